// Attention of few queries, each over keys of its own: read where they lie, once for all query heads of a group.

#include <algorithm>
#include <cmath>
#include <vector>

#include "vectors.h"

// Mirrors `_Arguments` in few_queries.py. Integer tensors and `bias` are dense.
struct FewArguments {
  int64_t size, threads;
  int64_t batch, kv_heads, group, queries, keys, dim, dim_v;
  int64_t slot_rows, slot_heads, columns;
  Operand q, k, v;
  const int64_t* slot;     // [B', H', Nq, C], the key in each column
  const uint8_t* allowed;  // likewise: whether the query sees it
  const void* bias;        // likewise, or null
  double scale, softcap;   // softcap 0: none
  void *out, *lse;         // [B, Hq, Nq, Dv], [B, Hq, Nq]
};

namespace {

int64_t rounded(int64_t elements) { return (elements + kGrain - 1) / kGrain * kGrain; }

template <typename T>
T sum_of(Vec<T> x) {
  T sum = 0;
  for (int i = 0; i < kLanes<T>; ++i) sum += x[i];
  return sum;
}

template <typename T>
const char* row_of(const Operand& x, int64_t b, int64_t h, int64_t n) {
  const int64_t item = x.is_bfloat16 ? 2 : int64_t(sizeof(T));
  return static_cast<const char*>(x.data) + (b * x.batch + h * x.head + n * x.row) * item;
}

// 0 where all of the row is finite, else NaN.
template <typename T>
T check(const T* row, int64_t wide) {
  Vec<T> products = {};
  for (int64_t d = 0; d < wide; d += kLanes<T>) products += load(row + d) * T(0);
  return sum_of<T>(products);
}

// One query and the heads of one group. Non-finite values in what the query sees make its row NaN, whatever their
// weight.
template <typename T>
void attend(const FewArguments& a, int64_t b, int64_t h, int64_t i) {
  constexpr int L = kLanes<T>;
  const int64_t wide = rounded(a.dim), wide_v = rounded(a.dim_v), columns = rounded(a.columns);
  const int64_t slots =
      (((a.slot_rows == 1 ? 0 : b) * a.slot_heads + (a.slot_heads == 1 ? 0 : h)) * a.queries + i) * a.columns;
  const int64_t* slot = a.slot + slots;
  const uint8_t* allowed = a.allowed + slots;
  const T* bias = a.bias ? static_cast<const T*>(a.bias) + slots : nullptr;
  std::vector<T> queries(a.group * wide, T(0)), weights(a.group * columns, -std::numeric_limits<T>::infinity());
  std::vector<T> row(std::max(wide, wide_v), T(0)), sums(a.group * wide_v, T(0));

  constexpr int64_t kAhead = 8;  // rows stand anywhere, so that no hardware prefetcher finds the next one
  const auto read = [&](const Operand& x, int64_t c, int64_t dim) {
    if (c + kAhead < a.columns) {
      const char* next = row_of<T>(x, b, h, slot[c + kAhead]);
      for (int64_t byte = 0; byte < dim * int64_t(sizeof(T)); byte += 64) __builtin_prefetch(next + byte);
    }
    read_row(x, row_of<T>(x, b, h, slot[c]), dim, row.data());
  };

  T bad = 0;
  bool any = false;
  for (int64_t g = 0; g < a.group; ++g)
    read_row(a.q, row_of<T>(a.q, b, h * a.group + g, i), a.dim, queries.data() + g * wide);
  for (int64_t c = 0; c < a.columns; ++c) {
    if (!allowed[c]) continue;
    any = true;
    read(a.k, c, a.dim);
    bad += check(row.data(), wide);
    for (int64_t g = 0; g < a.group; ++g) {
      Vec<T> products = {};
      for (int64_t d = 0; d < wide; d += L) products += load(row.data() + d) * load(queries.data() + g * wide + d);
      T score = sum_of<T>(products) * T(a.scale);
      if (a.softcap > 0) score = T(a.softcap) * std::tanh(score / T(a.softcap));
      weights[g * columns + c] = bias ? score + bias[c] : score;
    }
  }

  std::vector<T> totals(a.group), tops(a.group);
  for (int64_t g = 0; g < a.group; ++g) {
    T* of_head = weights.data() + g * columns;
    T top = std::numeric_limits<T>::lowest();
    for (int64_t c = 0; c < a.columns; ++c) top = std::max(top, of_head[c]);
    Vec<T> total = {};
    for (int64_t c = 0; c < columns; c += L) {
      const Vec<T> weight = exp_of_nonpositive<T>(load(of_head + c) - top);
      store(of_head + c, weight);
      total += weight;
    }
    tops[g] = top, totals[g] = sum_of<T>(total);
  }

  std::fill(row.begin(), row.end(), T(0));  // what pads rows of k is not what pads rows of v
  for (int64_t c = 0; c < a.columns; ++c) {
    if (!allowed[c]) continue;
    read(a.v, c, a.dim_v);
    bad += check(row.data(), wide_v);
    for (int64_t g = 0; g < a.group; ++g) {
      T* sum = sums.data() + g * wide_v;
      const T weight = weights[g * columns + c];
      for (int64_t d = 0; d < wide_v; d += L) store(sum + d, load(sum + d) + weight * load(row.data() + d));
    }
  }

  for (int64_t g = 0; g < a.group; ++g) {
    const int64_t at = ((b * a.kv_heads + h) * a.group + g) * a.queries + i;
    T* out = static_cast<T*>(a.out) + at * a.dim_v;
    const T spoilt = bad + check(queries.data() + g * wide, wide);
    for (int64_t d = 0; d < a.dim_v; ++d) out[d] = any ? sums[g * wide_v + d] / totals[g] + spoilt : T(0);
    static_cast<T*>(a.lse)[at] =
        any ? tops[g] + std::log(totals[g]) + spoilt : -std::numeric_limits<T>::infinity();
  }
}

template <typename T>
int64_t run(const FewArguments& a) {
  if (a.size != int64_t(sizeof(FewArguments))) return 1;
  const bool fits =
      (a.slot_rows == 1 || a.slot_rows == a.batch) && (a.slot_heads == 1 || a.slot_heads == a.kv_heads);
  if (!fits || a.threads < 1 || a.dim < 1 || a.dim_v < 1) return 2;
  for (int64_t c = 0; c < a.slot_rows * a.slot_heads * a.queries * a.columns; ++c)
    if (a.slot[c] < 0 || a.slot[c] >= a.keys) return 3;
  const int64_t units = a.batch * a.kv_heads * a.queries;
#pragma omp parallel for schedule(static) num_threads(a.threads) if (units * a.columns * a.dim > 65536)
  for (int64_t unit = 0; unit < units; ++unit)
    attend<T>(a, unit / a.queries / a.kv_heads, unit / a.queries % a.kv_heads, unit % a.queries);
  return 0;
}

}  // namespace

// 0, or which check failed: 1 the layout of the arguments, 2 sizes, 3 a row out of range.
extern "C" {
int64_t few_float(const FewArguments* a) { return run<float>(*a); }
int64_t few_double(const FewArguments* a) { return run<double>(*a); }
}
