// Vectors of floats as wide as the CPU's registers, and products that stay in registers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kRegisters = 32;
#elif defined(__AVX__)
constexpr int kLanes = 8, kRegisters = 16;
#elif defined(__aarch64__)
constexpr int kLanes = 4, kRegisters = 32;
#else
constexpr int kLanes = 4, kRegisters = 16;
#endif
constexpr int kSpan = 2 * kLanes;  // tokens, or features, that are processed at a time
// Rows of a product that are summed at a time, in two registers each.
constexpr int kRows = kRegisters == 32 ? 13 : 6;

using Vector = float __attribute__((vector_size(4 * kLanes)));
using Unaligned = float __attribute__((vector_size(4 * kLanes), aligned(4)));
using Integers = int32_t __attribute__((vector_size(4 * kLanes)));

inline Vector load(const float* from) { return *reinterpret_cast<const Unaligned*>(from); }
inline void store(float* to, Vector x) { *reinterpret_cast<Unaligned*>(to) = x; }

// 2^x for x from −126 to 126. A whole power of two times a polynomial in what is left, at most 1/2: the
// series of e^(x log 2), whose next term is 5e-9.
inline Vector exp2(Vector x) {
  const Vector shift = Vector{} + 12582912.0f;  // 1.5 · 2^23: adding it rounds to whole numbers
  const Vector shifted = x + shift;
  const Vector rest = x - (shifted - shift);
  Vector power = Vector{} + 1.5252734e-5f;
  for (const float term : {1.5403530e-4f, 1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f,
                           2.4022651e-1f, 6.9314718e-1f, 1.0f}) {
    power = power * rest + term;
  }
  const Integers exponent = (Integers(shifted) - Integers(shift)) << 23;
  return x == x ? Vector(Integers(power) + exponent) : x;  // NaN stays
}

// Flushes denormal numbers to 0 while it exists, in the thread that made it, on x86: arithmetic on one
// takes a hundred times as long there, and products of two strong decays are full of them.
class FlushDenormals {
#if defined(__SSE__)
 public:
  FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(before_); }

 private:
  const unsigned before_;
#endif
};

// Memory of one thread that starts at a cache line, so that no load crosses one.
class Scratch {
 public:
  explicit Scratch(size_t floats) : memory_(floats + 16) {
    const auto address = reinterpret_cast<uintptr_t>(memory_.data());
    next_ = memory_.data() + (64 - address % 64) % 64 / sizeof(float);
  }
  float* take(size_t floats) {
    float* const taken = next_;
    next_ += floats;
    return taken;
  }

 private:
  std::vector<float> memory_;
  float* next_;
};

// Copies the tokens from `first` on, of `width` rows of C, and fills up with zeros.
void load_tokens(const float* from, int width, int C, int first, float* to) {
  const int present = std::min(kSpan, C - first);
  for (int k = 0; k < width; ++k, to += kSpan) {
    std::copy_n(from + int64_t(k) * C + first, present, to);
    std::fill(to + present, to + kSpan, 0.0f);
  }
}

void store_tokens(const float* from, int width, int C, int first, float* to) {
  const int present = std::min(kSpan, C - first);
  for (int k = 0; k < width; ++k, from += kSpan) {
    std::copy_n(from, present, to + int64_t(k) * C + first);
  }
}

// The transpose of a square: of its quarters, of their quarters, and so on.
inline void transpose(Vector (&x)[kLanes]) {
#pragma GCC unroll 4
  for (int half = kLanes / 2; half > 0; half /= 2) {
    Integers upper, lower;
    for (int lane = 0; lane < kLanes; ++lane) {
      upper[lane] = lane & half ? lane - half + kLanes : lane;
      lower[lane] = lane & half ? lane + kLanes : lane + half;
    }
#pragma GCC unroll 16
    for (int row = 0; row < kLanes; ++row) {
      if (row & half) continue;
      const Vector above = x[row], below = x[row + half];
      x[row] = __builtin_shuffle(above, below, upper);
      x[row + half] = __builtin_shuffle(above, below, lower);
    }
  }
}

// Calls body(number of rows as a constant, first row).
template <typename Body, int Rows = kRows>
void call_with(int rows, int first, const Body& body) {
  if constexpr (Rows > 0) {
    if (rows == Rows) {
      body(std::integral_constant<int, Rows>{}, first);
    } else {
      call_with<Body, Rows - 1>(rows, first, body);
    }
  }
}

// The same for about equal parts of V rows.
template <typename Body>
void for_rows(int V, const Body& body) {
  for (int first = 0, parts = (V + kRows - 1) / kRows; parts > 0; --parts) {
    const int rows = (V - first) / parts;
    call_with(rows, first, body);
    first += rows;
  }
}

// out (Rows, kSpan) = keep · out + the product of a (Rows, steps) and b (steps, kSpan), with strides in
// numbers. Where keep is 0 `out` may be uninitialised.
template <int Rows>
inline void multiply(const float* a, int64_t a_row, int64_t a_step, const float* b, int64_t b_step,
                     int steps, float* out, int64_t out_row, float keep) {
  // `out` is read at the end, where the steps of the next product hide how long that takes.
  Vector sum[Rows][2] = {};
  for (int n = 0; n < steps; ++n, a += a_step, b += b_step) {
    const Vector b0 = load(b), b1 = load(b + kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      sum[r][0] += b0 * a[r * a_row];
      sum[r][1] += b1 * a[r * a_row];
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r, out += out_row) {
    store(out, keep == 0 ? sum[r][0] : load(out) * keep + sum[r][0]);
    store(out + kLanes, keep == 0 ? sum[r][1] : load(out + kLanes) * keep + sum[r][1]);
  }
}

// The same for any number of rows.
inline void multiply(int rows, const float* a, int64_t a_row, int64_t a_step, const float* b,
                     int64_t b_step, int steps, float* out, int64_t out_row, float keep) {
  for_rows(rows, [&](auto count, int first) {
    multiply<count>(a + first * a_row, a_row, a_step, b, b_step, steps, out + first * out_row,
                    out_row, keep);
  });
}

}  // namespace
