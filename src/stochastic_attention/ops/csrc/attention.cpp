// Attention over the tiles of one pass (see plan.py), forward and backward, for a CPU.
//
// A tile is 64 queries and the keys that any of them sees. Scores are held transposed, a row a key and a column a
// query: maxima, sums and exponentials then run down columns, a vector of queries at a time, and one matrix kernel
// serves all products. Keys are taken in panels of six rows; a panel computes only the columns that see one of its
// keys, in grains of 16, and is masked only where one of those sees less than all of them. Queries and keys of a tile
// are sorted by position, so that causality saves half of the products whatever the order the tile was cut from.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "vectors.h"

namespace {

constexpr int kTile = 64;            // queries of a tile: the bits of a word
constexpr int kPanel = 6;            // keys of a panel
constexpr int kChunk = 32 * kPanel;  // keys whose scores are held at once: they stay in the second-level cache
constexpr int kWave = 64;            // tiles planned at once, which bounds the memory of plans
constexpr int kStretch = 8;          // neighbouring tiles that one thread takes, because they share most keys

}  // namespace

// Mirrors `_Arguments` in cpp.py. Integer tensors are dense; -1 in query_rows marks an unused slot.
struct Arguments {
  int64_t size, threads, splits;
  int64_t batch, kv_heads, group, queries, keys, dim, dim_v;
  int64_t order_rows, order_heads, key_order_rows, key_order_heads, slots, key_slots;
  int64_t has_rule, causal, local, sinks, fresh;
  Operand q, k, v;
  const int64_t *query_rows, *key_rows;                         // [B', H', M], [B' or 1, H' or 1, K]
  const int32_t *start, *stop, *query_position, *key_position;  // likewise
  const void* bias;                                             // [B', H', M] or null
  double scale, softcap;                                        // softcap 0: none
  void *out, *lse;                                              // [B, Hq, Nq, Dv], [B, Hq, Nq]; backward only reads lse
  const void *d_out, *delta;                                    // likewise; delta = sum(d_out * out) - d_lse
  void *dq, *dk, *dv;                                           // [B, Hq, Nq, D], [splits, B, Hkv, Nk, D and Dv]
};

namespace {

template <typename T, int M, int N, bool kAdd>
inline void multiply_block(int64_t depth, const T* a, int64_t a_row, int64_t a_step, const T* b, int64_t b_row, T* c,
                           int64_t c_row) {
  constexpr int L = kLanes<T>;
  Vec<T> sum[M][N];
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) sum[i][j] = kAdd ? load(c + i * c_row + j * L) : Vec<T>{};
  for (int64_t p = 0; p < depth; ++p) {
    Vec<T> row[N];
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) row[j] = load(b + p * b_row + j * L);
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) {
      const T x = a[i * a_row + p * a_step];
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) sum[i][j] += x * row[j];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) store(c + i * c_row + j * L, sum[i][j]);
}

template <typename T, int N, bool kAdd>
void multiply_columns(int64_t rows, int64_t depth, const T* a, int64_t a_row, int64_t a_step, const T* b, int64_t b_row,
                      T* c, int64_t c_row) {
  for (; rows >= 6; rows -= 6, a += 6 * a_row, c += 6 * c_row)
    multiply_block<T, 6, N, kAdd>(depth, a, a_row, a_step, b, b_row, c, c_row);
  if (rows >= 4) {
    multiply_block<T, 4, N, kAdd>(depth, a, a_row, a_step, b, b_row, c, c_row);
    rows -= 4, a += 4 * a_row, c += 4 * c_row;
  }
  for (; rows > 0; --rows, a += a_row, c += c_row)
    multiply_block<T, 1, N, kAdd>(depth, a, a_row, a_step, b, b_row, c, c_row);
}

// c [rows, columns] = a [rows, depth] b [depth, columns], or += where kAdd. `columns` is a multiple of the grain;
// element (i, p) of a is at i * a_row + p * a_step.
template <bool kAdd, typename T>
void multiply(int64_t rows, int64_t columns, int64_t depth, const T* a, int64_t a_row, int64_t a_step, const T* b,
              int64_t b_row, T* c, int64_t c_row) {
  constexpr int L = kLanes<T>;
  int64_t left = columns / L;
  while (left > 0) {
    const int64_t taken = std::min<int64_t>(left, kMostColumns);
    if (taken == 1) multiply_columns<T, 1, kAdd>(rows, depth, a, a_row, a_step, b, b_row, c, c_row);
    if (taken == 2) multiply_columns<T, 2, kAdd>(rows, depth, a, a_row, a_step, b, b_row, c, c_row);
    if constexpr (kMostColumns > 2) {
      if (taken == 3) multiply_columns<T, 3, kAdd>(rows, depth, a, a_row, a_step, b, b_row, c, c_row);
      if (taken == 4) multiply_columns<T, 4, kAdd>(rows, depth, a, a_row, a_step, b, b_row, c, c_row);
    }
    left -= taken, b += taken * L, c += taken * L;
  }
}

struct Panel {
  uint8_t begin, end;  // grains of columns that see a key of the panel
  bool full;           // whether every column in them sees every key
};

struct Tile {
  int count = 0;                // queries, in columns 0 ... count - 1
  int32_t rows[kTile];          // where each query stands in q
  int32_t slots[kTile];         // and in the pass
  std::vector<int32_t> keys;    // where each key stands in k
  std::vector<uint64_t> masks;  // which columns see each key
  std::vector<Panel> panels;

  int64_t first_key(int64_t panel) const { return std::min<int64_t>(panel * kPanel, keys.size()); }
};

// One order of the pass: its slots, and those of them that hold a query with a non-empty interval.
struct Order {
  const int64_t *query_rows, *key_rows;
  const int32_t *start, *stop, *query_position, *key_position;
  const void* bias;
  std::vector<int32_t> used;

  int64_t tiles() const { return (int64_t(used.size()) + kTile - 1) / kTile; }
};

template <typename T>
std::vector<Order> read_orders(const Arguments& a, bool& valid) {
  std::vector<Order> orders(a.order_rows * a.order_heads);
  for (int64_t b = 0; b < a.order_rows; ++b)
    for (int64_t h = 0; h < a.order_heads; ++h) {
      const int64_t i = b * a.order_heads + h, at = i * a.slots;
      const int64_t key_row = std::min(b, a.key_order_rows - 1), key_head = std::min(h, a.key_order_heads - 1);
      const int64_t key_at = (key_row * a.key_order_heads + key_head) * a.key_slots;
      Order& o = orders[i];
      o.query_rows = a.query_rows + at, o.start = a.start + at, o.stop = a.stop + at;
      o.query_position = a.query_position + at, o.bias = a.bias ? static_cast<const T*>(a.bias) + at : nullptr;
      o.key_rows = a.key_rows + key_at, o.key_position = a.key_position + key_at;
      for (int64_t s = 0; s < a.slots; ++s) {
        if (o.query_rows[s] < 0 || o.stop[s] <= o.start[s]) continue;
        valid = valid && o.query_rows[s] < a.queries && o.start[s] >= 0 && o.stop[s] <= a.key_slots;
        o.used.push_back(int32_t(s));
      }
      for (int64_t s = 0; s < a.key_slots; ++s) valid = valid && o.key_rows[s] >= 0 && o.key_rows[s] < a.keys;
    }
  return orders;
}

// Which columns the rule lets see a key at `position`; `positions` are those of the columns' queries.
uint64_t allowed_by_rule(const Arguments& a, int32_t position, const int32_t* positions, int count, bool ascending) {
  if (position < a.sinks) return 0;
  uint64_t mask = 0;
  if (a.causal && ascending) {
    const auto first = std::lower_bound(positions, positions + count, position + a.local) - positions;
    return first == kTile ? 0 : ~uint64_t(0) << first;
  }
  for (int i = 0; i < count; ++i) {
    const int64_t distance = int64_t(positions[i]) - position;
    const bool allowed = a.causal ? distance >= a.local : !a.local || std::abs(distance) > a.local;
    mask |= uint64_t(allowed) << i;
  }
  return mask;
}

void plan_tile(const Arguments& a, const Order& o, int64_t index, Tile& tile) {
  const int32_t* first = o.used.data() + index * kTile;
  tile.count = int(std::min<int64_t>(kTile, int64_t(o.used.size()) - index * kTile));
  std::copy_n(first, tile.count, tile.slots);
  int32_t latest_start = 0, earliest_stop = std::numeric_limits<int32_t>::max();
  for (int i = 0; i < tile.count; ++i) {
    latest_start = std::max(latest_start, o.start[first[i]]);
    earliest_stop = std::min(earliest_stop, o.stop[first[i]]);
  }
  // Sorting by position pays where most keys are common to all queries; else the order of slots keeps ranges narrow.
  const bool sorted = a.has_rule && latest_start < earliest_stop;
  if (sorted)
    std::stable_sort(tile.slots, tile.slots + tile.count,
                     [&](int32_t x, int32_t y) { return o.query_position[x] < o.query_position[y]; });
  int32_t positions[kTile];
  struct Event {
    int32_t slot;
    uint64_t column;
  } events[2 * kTile];
  for (int i = 0; i < tile.count; ++i) {
    const int32_t s = tile.slots[i];
    tile.rows[i] = int32_t(o.query_rows[s]);
    positions[i] = o.query_position[s];
    events[2 * i] = {o.start[s], uint64_t(1) << i};
    events[2 * i + 1] = {o.stop[s], uint64_t(1) << i};
  }
  std::sort(events, events + 2 * tile.count, [](const Event& x, const Event& y) { return x.slot < y.slot; });

  struct Found {
    uint64_t place;  // sorts keys that all queries' intervals hold first, then by position
    uint64_t mask;
    int32_t row;
  };
  static thread_local std::vector<Found> found;
  found.clear();
  const uint64_t everyone = ~uint64_t(0) >> (kTile - tile.count);
  uint64_t inside = 0;
  for (int e = 0; e + 1 < 2 * tile.count; ++e) {
    inside ^= events[e].column;
    if (!inside) continue;
    for (int32_t s = events[e].slot; s < events[e + 1].slot; ++s) {
      const int32_t position = o.key_position[s];
      const uint64_t mask =
          a.has_rule ? inside & allowed_by_rule(a, position, positions, tile.count, sorted) : inside;
      if (!mask) continue;
      const uint64_t place = sorted ? uint64_t(inside != everyone) << 32 | uint32_t(position) : found.size();
      found.push_back({place, mask, int32_t(o.key_rows[s])});
    }
  }
  if (sorted)
    std::stable_sort(found.begin(), found.end(), [](const Found& x, const Found& y) { return x.place < y.place; });

  tile.keys.resize(found.size());
  tile.masks.resize(found.size());
  for (size_t i = 0; i < found.size(); ++i) tile.keys[i] = found[i].row, tile.masks[i] = found[i].mask;
  tile.panels.resize((found.size() + kPanel - 1) / kPanel);
  for (size_t p = 0; p < tile.panels.size(); ++p) {
    uint64_t any = 0, all = ~uint64_t(0);
    for (int64_t i = tile.first_key(p); i < tile.first_key(p + 1); ++i) any |= tile.masks[i], all &= tile.masks[i];
    const int begin = __builtin_ctzll(any) / kGrain, end = (63 - __builtin_clzll(any)) / kGrain + 1;
    const uint64_t range = (~uint64_t(0) >> (kTile - kGrain * (end - begin))) << (kGrain * begin);
    tile.panels[p] = {uint8_t(begin), uint8_t(end), (all & range) == range};
  }
}

// Memory of one thread, reused from tile to tile. Every array starts on a cache line.
template <typename T>
class Arena {
 public:
  explicit Arena(size_t elements) : memory_(static_cast<T*>(std::aligned_alloc(64, elements * sizeof(T)))) {
    if (!memory_) throw std::bad_alloc();
    std::fill_n(memory_.get(), elements, T(0));
  }
  static int64_t rounded(int64_t elements) { return (elements + kGrain - 1) / kGrain * kGrain; }
  T* take(int64_t elements) {
    T* array = memory_.get() + taken_;
    taken_ += rounded(elements);
    return array;
  }

 private:
  struct Free {
    void operator()(T* p) const { std::free(p); }
  };
  std::unique_ptr<T, Free> memory_;
  int64_t taken_ = 0;
};

// Rows `rows` of a head, one after the other, `width` apart; what is between dim and width stays as it was.
template <typename T>
void gather(const Operand& x, int64_t b, int64_t h, const int32_t* rows, int64_t count, int64_t dim, T* to,
            int64_t width) {
  const int64_t item = x.is_bfloat16 ? 2 : int64_t(sizeof(T)), row = x.row * item;
  const char* base = static_cast<const char*>(x.data) + (b * x.batch + h * x.head) * item;
  constexpr int64_t kAhead = 6;  // rows stand anywhere, so that no hardware prefetcher finds the next one
  for (int64_t i = 0; i < count; ++i) {
    if (i + kAhead < count) {
      const char* next = base + rows[i + kAhead] * row;
      for (int64_t byte = 0; byte < dim * item; byte += 64) __builtin_prefetch(next + byte);
    }
    read_row(x, base + rows[i] * row, dim, to + i * width);
  }
}

template <typename T>
void transpose_tile(const T* from, int64_t width, int64_t dim, T* to) {
  for (int64_t begin = 0; begin < dim; begin += kGrain)
    for (int i = 0; i < kTile; ++i)
      for (int64_t d = begin; d < std::min(begin + kGrain, dim); ++d) to[d * kTile + i] = from[i * width + d];
}

template <typename F>
void for_each_run(const Tile& t, int64_t begin, int64_t end, F f) {
  for (int64_t p = begin; p < end;) {
    int64_t next = p + 1;
    while (next < end && t.panels[next].begin == t.panels[p].begin && t.panels[next].end == t.panels[p].end) ++next;
    f(t.first_key(p), t.first_key(next), kGrain * t.panels[p].begin, kGrain * t.panels[p].end);
    p = next;
  }
}

template <typename F>
void for_each_run_of_grain(const Tile& t, int64_t begin, int64_t end, int grain, F f) {
  for (int64_t p = begin; p < end;) {
    const auto holds = [&](int64_t i) { return t.panels[i].begin <= grain && grain < t.panels[i].end; };
    if (!holds(p)) {
      ++p;
      continue;
    }
    int64_t next = p + 1;
    while (next < end && holds(next)) ++next;
    f(t.first_key(p), t.first_key(next));
    p = next;
  }
}

// Attention of the tiles of one head by one thread.
template <typename T>
class Worker {
  using V = Vec<T>;
  static constexpr int L = kLanes<T>;
  static constexpr int64_t kChunkPanels = kChunk / kPanel;

 public:
  Worker(const Arguments& a, bool backward)
      : a_(a), wide_(Arena<T>::rounded(a.dim)), wide_v_(Arena<T>::rounded(a.dim_v)), arena_(elements(a, backward)) {
    const int64_t tile = a.group * kTile;
    q_ = arena_.take(tile * wide_), qt_ = arena_.take(tile * a.dim);
    k_ = arena_.take(kChunk * wide_), v_ = arena_.take(kChunk * wide_v_), s_ = arena_.take(kChunk * kTile);
    top_ = arena_.take(tile), total_ = arena_.take(tile);
    out_ = arena_.take(tile * wide_v_);
    if (!backward) return;
    ds_ = arena_.take(kChunk * kTile), dq_ = arena_.take(tile * wide_), dout_t_ = arena_.take(tile * a.dim_v);
    dk_ = arena_.take(kChunk * wide_), dv_ = arena_.take(kChunk * wide_v_);
  }

  void forward(const Order& o, const Tile& t, int64_t b, int64_t h, int64_t head_begin, int64_t head_end) {
    for (int64_t g = head_begin; g < head_end; ++g) {
      read_queries(t, b, h, g);
      std::fill_n(top_ + g * kTile, kTile, -kInfinity<T>);
      std::fill_n(total_ + g * kTile, kTile, T(0));
      std::fill_n(out_ + g * kTile * wide_v_, kTile * wide_v_, T(0));
    }
    const int64_t panels = t.panels.size();
    for (int64_t begin = 0; begin < panels; begin += kChunkPanels) {
      const int64_t end = std::min(begin + kChunkPanels, panels), first = t.first_key(begin);
      const int64_t count = t.first_key(end) - first;
      gather(a_.k, b, h, t.keys.data() + first, count, a_.dim, k_, wide_);
      gather(a_.v, b, h, t.keys.data() + first, count, a_.dim_v, v_, wide_v_);
      for (int64_t g = head_begin; g < head_end; ++g) {
        score(t, begin, end, g);
        mask(t, begin, end, -kInfinity<T>, s_);
        weigh(t, begin, end, g);
        for (int grain = 0; grain < kTile / kGrain; ++grain)
          for_each_run_of_grain(t, begin, end, grain, [&](int64_t from, int64_t to) {
            multiply<true>(kGrain, wide_v_, to - from, s_ + (from - first) * kTile + grain * kGrain, 1, kTile,
                           v_ + (from - first) * wide_v_, wide_v_, out_ + (g * kTile + grain * kGrain) * wide_v_,
                           wide_v_);
          });
      }
    }
    for (int64_t g = head_begin; g < head_end; ++g) write(o, t, b, h, g);
  }

  void backward(const Order& o, const Tile& t, int64_t b, int64_t h, int64_t head_begin, int64_t head_end, T* dk,
                T* dv) {
    for (int64_t g = head_begin; g < head_end; ++g) {
      read_queries(t, b, h, g);
      std::fill_n(dq_ + g * kTile * wide_, kTile * wide_, T(0));
      const int64_t at = query_head(b, h, g) * a_.queries;
      const Operand d_out{a_.d_out, 0, a_.queries * a_.dim_v, a_.dim_v, 0};
      T* rows = out_ + g * kTile * wide_v_;
      gather(d_out, 0, query_head(b, h, g), t.rows, t.count, a_.dim_v, rows, wide_v_);
      std::fill(rows + t.count * wide_v_, rows + kTile * wide_v_, T(0));
      transpose_tile(rows, wide_v_, a_.dim_v, dout_t_ + g * kTile * a_.dim_v);
      for (int i = 0; i < kTile; ++i) {
        const bool used = i < t.count;
        const T bias = used && o.bias ? static_cast<const T*>(o.bias)[t.slots[i]] : T(0);
        top_[g * kTile + i] = used ? static_cast<const T*>(a_.lse)[at + t.rows[i]] - bias : kInfinity<T>;
        total_[g * kTile + i] = used ? static_cast<const T*>(a_.delta)[at + t.rows[i]] : T(0);
      }
    }
    const int64_t panels = t.panels.size();
    for (int64_t begin = 0; begin < panels; begin += kChunkPanels) {
      const int64_t end = std::min(begin + kChunkPanels, panels), first = t.first_key(begin);
      const int64_t count = t.first_key(end) - first;
      gather(a_.k, b, h, t.keys.data() + first, count, a_.dim, k_, wide_);
      gather(a_.v, b, h, t.keys.data() + first, count, a_.dim_v, v_, wide_v_);
      std::fill_n(dk_, count * wide_, T(0));
      std::fill_n(dv_, count * wide_v_, T(0));
      for (int64_t g = head_begin; g < head_end; ++g) {
        const T *rows = q_ + g * kTile * wide_, *d_rows = out_ + g * kTile * wide_v_;
        score(t, begin, end, g);
        for_each_run(t, begin, end, [&](int64_t from, int64_t to, int left, int right) {
          multiply<false>(to - from, right - left, a_.dim_v, v_ + (from - first) * wide_v_, wide_v_, 1,
                          dout_t_ + g * kTile * a_.dim_v + left, kTile, ds_ + (from - first) * kTile + left, kTile);
          derive(from - first, to - first, left, right, g);
        });
        mask(t, begin, end, T(0), s_);
        mask(t, begin, end, T(0), ds_);
        for_each_run(t, begin, end, [&](int64_t from, int64_t to, int left, int right) {
          const int64_t at = (from - first) * kTile + left;
          multiply<true>(to - from, wide_v_, right - left, s_ + at, kTile, 1, d_rows + left * wide_v_, wide_v_,
                         dv_ + (from - first) * wide_v_, wide_v_);
          multiply<true>(to - from, wide_, right - left, ds_ + at, kTile, 1, rows + left * wide_, wide_,
                         dk_ + (from - first) * wide_, wide_);
        });
        for (int grain = 0; grain < kTile / kGrain; ++grain)
          for_each_run_of_grain(t, begin, end, grain, [&](int64_t from, int64_t to) {
            multiply<true>(kGrain, wide_, to - from, ds_ + (from - first) * kTile + grain * kGrain, 1, kTile,
                           k_ + (from - first) * wide_, wide_, dq_ + (g * kTile + grain * kGrain) * wide_, wide_);
          });
      }
      for (int64_t i = 0; i < count; ++i) {
        add_row(dk_ + i * wide_, a_.dim, T(1), dk + t.keys[first + i] * a_.dim);
        add_row(dv_ + i * wide_v_, a_.dim_v, T(1), dv + t.keys[first + i] * a_.dim_v);
      }
    }
    for (int64_t g = head_begin; g < head_end; ++g) {
      T* dq = static_cast<T*>(a_.dq) + query_head(b, h, g) * a_.queries * a_.dim;
      for (int i = 0; i < t.count; ++i)
        add_row(dq_ + (g * kTile + i) * wide_, a_.dim, T(a_.scale), dq + t.rows[i] * a_.dim);
    }
  }

 private:
  static size_t elements(const Arguments& a, bool backward) {
    const int64_t wide = Arena<T>::rounded(a.dim), wide_v = Arena<T>::rounded(a.dim_v), tile = a.group * kTile;
    const int64_t forward = tile * (2 * wide + wide_v + 2) + kChunk * (wide + wide_v + kTile);
    return forward + (backward ? tile * (wide + wide_v) + kChunk * (wide + wide_v + kTile) : 0);
  }

  int64_t query_head(int64_t b, int64_t h, int64_t g) const { return (b * a_.kv_heads + h) * a_.group + g; }

  static void add_row(const T* from, int64_t dim, T factor, T* to) {
    for (int64_t d = 0; d < dim; ++d) to[d] += factor * from[d];
  }

  // The scaled queries, as rows and as columns; unused columns are 0.
  void read_queries(const Tile& t, int64_t b, int64_t h, int64_t g) {
    T* rows = q_ + g * kTile * wide_;
    gather(a_.q, b, h * a_.group + g, t.rows, t.count, a_.dim, rows, wide_);
    const T scale = T(a_.scale);
    for (int64_t i = 0; i < t.count * wide_; ++i) rows[i] *= scale;
    std::fill(rows + t.count * wide_, rows + kTile * wide_, T(0));
    transpose_tile(rows, wide_, a_.dim, qt_ + g * kTile * a_.dim);
  }

  void score(const Tile& t, int64_t begin, int64_t end, int64_t g) {
    const int64_t first = t.first_key(begin);
    for_each_run(t, begin, end, [&](int64_t from, int64_t to, int left, int right) {
      multiply<false>(to - from, right - left, a_.dim, k_ + (from - first) * wide_, wide_, 1,
                      qt_ + g * kTile * a_.dim + left, kTile, s_ + (from - first) * kTile + left, kTile);
      if (a_.softcap > 0)
        for (int64_t i = from - first; i < to - first; ++i)
          for (T* s = s_ + i * kTile + left; s < s_ + i * kTile + right; s += L)
            store(s, cap_softly<T>(load(s), T(a_.softcap)));
    });
  }

  void mask(const Tile& t, int64_t begin, int64_t end, T excluded, T* scores) const {
    using Ints = typename Numbers<T>::Ints;
    Ints bit;
    for (int i = 0; i < L; ++i) bit[i] = 1 << i;
    const V other = V{} + excluded;
    const int64_t first = t.first_key(begin);
    for (int64_t p = begin; p < end; ++p) {
      if (t.panels[p].full) continue;
      for (int64_t i = t.first_key(p); i < t.first_key(p + 1); ++i)
        for (int column = kGrain * t.panels[p].begin; column < kGrain * t.panels[p].end; column += L) {
          T* s = scores + (i - first) * kTile + column;
          const Ints seen = (Ints{} + int((t.masks[i] >> column) & 0xffff)) & bit;
          store(s, seen != Ints{} ? load(s) : other);
        }
    }
  }

  // Scores to weights under the running maximum, whose rise the sums so far are rescaled by.
  void weigh(const Tile& t, int64_t begin, int64_t end, int64_t g) {
    const int64_t first = t.first_key(begin);
    for (int column = 0; column < kTile; column += L) {
      T *top_at = top_ + g * kTile + column, *total_at = total_ + g * kTile + column;
      const V before = load(top_at);
      V top = before;
      for_each_run_of_grain(t, begin, end, column / kGrain, [&](int64_t from, int64_t to) {
        for (const T* s = s_ + (from - first) * kTile + column; s < s_ + (to - first) * kTile; s += kTile) {
          const V x = load(s);
          top = x > top ? x : top;
        }
      });
      const V floor = V{} + std::numeric_limits<T>::lowest();
      const V finite = top > floor ? top : floor;
      V sum = {};
      for_each_run_of_grain(t, begin, end, column / kGrain, [&](int64_t from, int64_t to) {
        for (T* s = s_ + (from - first) * kTile + column; s < s_ + (to - first) * kTile; s += kTile) {
          const V weight = exp_of_nonpositive<T>(load(s) - finite);
          store(s, weight);
          sum += weight;
        }
      });
      const V kept = exp_of_nonpositive<T>(before - finite);
      store(top_at, top);
      store(total_at, load(total_at) * kept + sum);
      if (begin == 0) continue;
      for (int i = 0; i < L; ++i)
        if (kept[i] != T(1)) {
          T* row = out_ + (g * kTile + column + i) * wide_v_;
          for (int64_t d = 0; d < wide_v_; ++d) row[d] *= kept[i];
        }
    }
  }

  // Scores in s_ and products with d_out in ds_, to weights and gradients of the scores.
  void derive(int64_t from, int64_t to, int left, int right, int64_t g) {
    for (int column = left; column < right; column += L) {
      const V lse = load(top_ + g * kTile + column), delta = load(total_ + g * kTile + column);
      for (int64_t i = from; i < to; ++i) {
        T *s = s_ + i * kTile + column, *ds = ds_ + i * kTile + column;
        const V score = load(s), weight = exp_of_nonpositive<T>(score - lse);
        V gradient = weight * (load(ds) - delta);
        if (a_.softcap > 0) gradient *= T(1) - score * score * T(1 / (a_.softcap * a_.softcap));
        store(s, weight);
        store(ds, gradient);
      }
    }
  }

  // Merge with what earlier passes found for the same queries: a softmax over two disjoint sets of keys.
  void write(const Order& o, const Tile& t, int64_t b, int64_t h, int64_t g) {
    T* out = static_cast<T*>(a_.out) + query_head(b, h, g) * a_.queries * a_.dim_v;
    T* lse = static_cast<T*>(a_.lse) + query_head(b, h, g) * a_.queries;
    for (int i = 0; i < t.count; ++i) {
      const T total = total_[g * kTile + i];
      if (!(total > T(0))) continue;
      T own = top_[g * kTile + i] + std::log(total);
      if (o.bias) own += static_cast<const T*>(o.bias)[t.slots[i]];
      const T* from = out_ + (g * kTile + i) * wide_v_;
      T *to = out + t.rows[i] * a_.dim_v, *old = lse + t.rows[i];
      if (a_.fresh || *old == -kInfinity<T>) {
        const T factor = T(1) / total;
        for (int64_t d = 0; d < a_.dim_v; ++d) to[d] = from[d] * factor;
        *old = own;
      } else {
        const T larger = std::max(own, *old), merged = larger + std::log1p(std::exp(std::min(own, *old) - larger));
        const T kept = std::exp(*old - merged), factor = std::exp(own - merged) / total;
        for (int64_t d = 0; d < a_.dim_v; ++d) to[d] = to[d] * kept + from[d] * factor;
        *old = merged;
      }
    }
  }

  const Arguments& a_;
  const int64_t wide_, wide_v_;  // rows padded to whole grains; the padding stays 0
  Arena<T> arena_;
  T *q_, *qt_;          // [R, 64, wide], [R, D, 64]
  T *k_, *v_;           // [chunk, wide]
  T* s_;                // [chunk, 64], scores, then weights
  T *top_, *total_;     // [R, 64]: running maximum and sum; backward: lse and delta
  T* out_;              // [R, 64, wide_v]: sums; backward: d_out
  T *ds_, *dq_, *dout_t_, *dk_, *dv_;
};

// What runs in parallel, wave by wave; heads that share an order have their tiles in common.
template <typename T>
int64_t run(const Arguments& a, bool backward) {
  if (a.size != int64_t(sizeof(Arguments))) return 1;
  const bool of_query_heads = a.order_heads > a.kv_heads;  // an order of its own for each query head
  const bool fits = (a.order_rows == 1 || a.order_rows == a.batch) &&
                    (a.order_heads == 1 || a.order_heads == a.kv_heads || a.order_heads == a.kv_heads * a.group);
  bool valid = fits && a.dim > 0 && a.dim_v > 0 && a.threads > 0 && a.splits > 0;
  if (!valid) return 2;
  const std::vector<Order> orders = read_orders<T>(a, valid);
  if (!valid) return 3;

  std::vector<std::unique_ptr<Worker<T>>> workers;
  for (int64_t i = 0; i < a.threads; ++i) workers.push_back(std::make_unique<Worker<T>>(a, backward));
  int64_t longest = 0;
  for (const Order& o : orders) longest = std::max(longest, o.tiles());
  std::vector<Tile> tiles(orders.size() * kWave);
  const int64_t per_kv_head = of_query_heads ? a.group : 1;
  const auto thread = [] {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
  };

  for (int64_t wave = 0; wave < longest; wave += kWave) {
    const int64_t width = std::min<int64_t>(kWave, longest - wave);
    const auto holds = [&](int64_t order, int64_t i) { return wave + i < orders[order].tiles(); };
#pragma omp parallel for schedule(dynamic) num_threads(a.threads)
    for (int64_t j = 0; j < int64_t(orders.size()) * width; ++j) {
      const int64_t order = j / width, i = j % width;
      if (holds(order, i)) plan_tile(a, orders[order], wave + i, tiles[order * kWave + i]);
    }
    // Heads b, h and, where those have orders of their own, query heads of the group.
    const auto visit = [&](int64_t b, int64_t h, int64_t part, int64_t begin, int64_t end, auto&& f) {
      const int64_t order_head = a.order_heads == 1 ? 0 : h * per_kv_head + part;
      const int64_t order = (a.order_rows == 1 ? 0 : b) * a.order_heads + order_head;
      const int64_t first = of_query_heads ? part : 0, last = of_query_heads ? part + 1 : a.group;
      for (int64_t i = begin; i < end && holds(order, i); ++i) f(orders[order], tiles[order * kWave + i], first, last);
    };
    if (!backward) {
      const int64_t stretches = (width + kStretch - 1) / kStretch;
      const int64_t units = a.batch * a.kv_heads * per_kv_head * stretches;
#pragma omp parallel for schedule(dynamic) num_threads(a.threads)
      for (int64_t unit = 0; unit < units; ++unit) {
        const int64_t begin = unit % stretches * kStretch, head = unit / stretches;
        const int64_t part = head % per_kv_head, kv_head = head / per_kv_head;
        const int64_t h = kv_head % a.kv_heads, b = kv_head / a.kv_heads;
        visit(b, h, part, begin, std::min(begin + kStretch, width),
              [&](const Order& o, const Tile& t, int64_t first, int64_t last) {
                workers[thread()]->forward(o, t, b, h, first, last);
              });
      }
    } else {
      // Gradients of keys are summed by one thread a head and split, in the order of tiles: always the same sum.
      const int64_t units = a.splits * a.batch * a.kv_heads;
#pragma omp parallel for schedule(dynamic) num_threads(a.threads)
      for (int64_t unit = 0; unit < units; ++unit) {
        const int64_t split = unit % a.splits, head = unit / a.splits, h = head % a.kv_heads, b = head / a.kv_heads;
        const int64_t at = (split * a.batch * a.kv_heads + head) * a.keys;
        for (int64_t part = 0; part < per_kv_head; ++part)
          visit(b, h, part, split * width / a.splits, (split + 1) * width / a.splits,
                [&](const Order& o, const Tile& t, int64_t first, int64_t last) {
                  workers[thread()]->backward(o, t, b, h, first, last, static_cast<T*>(a.dk) + at * a.dim,
                                              static_cast<T*>(a.dv) + at * a.dim_v);
                });
      }
    }
  }
  return 0;
}

template <typename T>
int64_t run_and_catch(const Arguments* a, bool backward) {
  try {
    return run<T>(*a, backward);
  } catch (const std::bad_alloc&) {
    return 4;
  }
}

}  // namespace

// 0, or which check failed: 1 the layout of the arguments, 2 sizes, 3 a row or a slot out of range, 4 memory.
extern "C" {
int64_t forward_float(const Arguments* a) { return run_and_catch<float>(a, false); }
int64_t forward_double(const Arguments* a) { return run_and_catch<double>(a, false); }
int64_t backward_float(const Arguments* a) { return run_and_catch<float>(a, true); }
int64_t backward_double(const Arguments* a) { return run_and_catch<double>(a, true); }
}
