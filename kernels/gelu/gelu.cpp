// GELU by its approximation with tanh, x σ(2u) with u = √(2/π) (x + 0.044715 x³), and its gradient.

#include "vectors.h"

namespace {

constexpr float kScale = 0.7978845608f, kCubic = 0.044715f;

// σ(2u) = 1 / (1 + 2^(−2u / log 2)), where 2^64 counts as infinite, and 2^−64 as 0.
inline Vector sigmoid_of(Vector x) {
  const Vector exponent = x * (x * x * kCubic + 1.0f) * (-2.0f * kScale * 1.4426950409f);
  const Vector above = exponent < -64.0f ? Vector{} - 64.0f : exponent;
  const Vector bounded = above > 64.0f ? Vector{} + 64.0f : above;
  const Vector sigmoid = 1.0f / (exp2(bounded) + 1.0f);
  return exponent > 64.0f ? Vector{} : sigmoid;
}

inline Vector value(Vector x, Vector) { return x * sigmoid_of(x); }

inline Vector gradient(Vector x, Vector dy) {
  const Vector sigmoid = sigmoid_of(x);
  const Vector slope = (x * x * (3.0f * kCubic) + 1.0f) * (2.0f * kScale);  // of 2u
  return dy * (sigmoid + x * sigmoid * (1.0f - sigmoid) * slope);
}

template <typename Function>
void map(const float* x, const float* dy, float* out, int64_t size, int threads,
         Function function) {
  const int64_t whole = size / kLanes * kLanes;
#pragma omp parallel for num_threads(threads) if (size > 1 << 15)  // waking threads takes longer
  for (int64_t i = 0; i < whole; i += kLanes) store(out + i, function(load(x + i), load(dy + i)));
  float rest[3][kLanes] = {};
  std::copy(x + whole, x + size, rest[0]);
  std::copy(dy + whole, dy + size, rest[1]);
  store(rest[2], function(load(rest[0]), load(rest[1])));
  std::copy_n(rest[2], size - whole, out + whole);
}

}  // namespace

extern "C" {

void gelu(const float* x, float* y, int64_t size, int threads) {
  map(x, x, y, size, threads, value);
}

void gelu_backward(const float* x, const float* dy, float* dx, int64_t size, int threads) {
  map(x, dy, dx, size, threads, gradient);
}

}  // extern "C"
