// What the kernels share: vectors of whatever width -march allows, the exponential, and rows of a strided tensor.
//
// No library but the standard one, and nothing of the instruction set but a vector's width: compilers turn the vector
// types below into instructions. Storage is the compute type T, or bfloat16 widened on reading.

#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX512F__)
inline constexpr int kVectorBytes = 64;
inline constexpr int kMostColumns = 4;  // vectors of a row of products held in registers: 6 x 4 of 32
#elif defined(__AVX__)
inline constexpr int kVectorBytes = 32;
inline constexpr int kMostColumns = 2;  // 6 x 2 of 16
#else
inline constexpr int kVectorBytes = 16;
inline constexpr int kMostColumns = 2;
#endif

inline constexpr int kGrain = 16;  // what rows are padded to a multiple of: whole vectors of any width

struct Operand {  // [B, H, N, D], rows dense
  const void* data;
  int64_t batch, head, row;  // strides in elements
  int64_t is_bfloat16;
};

template <typename T>
struct Numbers;

template <>
struct Numbers<float> {
  typedef float Vec __attribute__((vector_size(kVectorBytes)));
  typedef int32_t Ints __attribute__((vector_size(kVectorBytes)));
  static constexpr int mantissa = 23, bias = 127, degree = 7;
  static constexpr float round = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  static constexpr float ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f, least = -87.0f;
};

template <>
struct Numbers<double> {
  typedef double Vec __attribute__((vector_size(kVectorBytes)));
  typedef int64_t Ints __attribute__((vector_size(kVectorBytes)));
  static constexpr int mantissa = 52, bias = 1023, degree = 13;
  static constexpr double round = 6755399441055744.0;
  static constexpr double ln2_high = 6.93145751953125e-1, ln2_low = 1.42860682030941723212e-6, least = -708.0;
};

template <typename T>
using Vec = typename Numbers<T>::Vec;

template <typename T>
inline constexpr int kLanes = kVectorBytes / sizeof(T);

template <typename T>
inline constexpr T kInfinity = std::numeric_limits<T>::infinity();

template <typename T>
inline Vec<T> load(const T* from) {
  Vec<T> x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}

template <typename T>
inline void store(T* to, Vec<T> x) {
  std::memcpy(to, &x, sizeof(x));
}

// e^x for x <= 0, with what is above taken for rounding; exactly 0 where the result would not be a normal number.
template <typename T>
inline Vec<T> exp_of_nonpositive(Vec<T> x) {
  using N = Numbers<T>;
  using Ints = typename N::Ints;
  const Vec<T> zero = {};
  const auto vanishes = x < N::least;
  x = x > zero ? zero : x;
  const Vec<T> shifted = x * T(1.44269504088896340736) + N::round;
  const Vec<T> n = shifted - N::round;
  const Vec<T> r = (x - n * N::ln2_high) - n * N::ln2_low;  // abs(r) <= ln(2) / 2, where Taylor's series is short
  Vec<T> sum = zero + T(1);
#pragma GCC unroll 16
  for (int i = N::degree; i > 0; --i) sum = sum * r * T(1.0 / i) + T(1);
  Ints whole, power;
  const Vec<T> origin = zero + N::round;
  std::memcpy(&whole, &shifted, sizeof(whole));
  std::memcpy(&power, &origin, sizeof(power));
  power = (whole - power + N::bias) << N::mantissa;
  Vec<T> scale;
  std::memcpy(&scale, &power, sizeof(scale));
  return vanishes ? zero : sum * scale;
}

// cap * tanh(x / cap)
template <typename T>
inline Vec<T> cap_softly(Vec<T> x, T cap) {
  const Vec<T> zero = {};
  const Vec<T> size = x < zero ? -x : x;
  const Vec<T> e = exp_of_nonpositive<T>(size * (T(-2) / cap));
  const Vec<T> capped = cap * (T(1) - e) / (T(1) + e);
  return x < zero ? -capped : capped;
}

template <typename T>
inline void read_row(const Operand& x, const char* row, int64_t dim, T* to) {
  if constexpr (sizeof(T) == 4) {
    if (x.is_bfloat16) {
      const uint16_t* from = reinterpret_cast<const uint16_t*>(row);
      for (int64_t d = 0; d < dim; ++d) {
        const uint32_t bits = uint32_t(from[d]) << 16;
        std::memcpy(to + d, &bits, 4);
      }
      return;
    }
  }
  std::memcpy(to, row, dim * sizeof(T));
}
