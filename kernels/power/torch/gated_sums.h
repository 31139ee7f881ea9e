// Several gated sums over the same scores in the attention form, added up:
//
//   out_t = Σ_n a_tn Σ_i exp(G_tn − G_in) (scale q_t·k_i)^p b_in v_i
//
// The gated sums are added before the product with the values. So there is one product for the scores
// and one with the values, however many sums there are, and as many in a backward pass as for one.
#pragma once

#include "attention_form.h"

namespace {

// The S gated sums of one key head, and what a span of queries and a block of keys have of them.
class GatedSums {
 public:
  static size_t size(int S, const Sizes& n) {
    return size_t(S) * ((n.blocks + 2) * round_up(n.C) + 2 * kSpan);
  }

  GatedSums(Scratch& scratch, int S, const Sizes& n)
      : S(S),
        C_(n.C),
        tokens_(int64_t(n.blocks) * n.C),
        value_scale_(scratch.take(size_t(S) * n.blocks * round_up(n.C))),
        key_scale_(scratch.take(size_t(S) * round_up(n.C))),
        key_decay_(scratch.take(size_t(S) * round_up(n.C))),
        output_scale_(scratch.take(size_t(S) * kSpan)),
        after_(scratch.take(size_t(S) * kSpan)) {}

  // log_decay (B, G, S, blocks · C)
  void load_head(const Tokens<const float>& value_scale, const double* log_decay, const Sizes& n,
                 int b, int g) {
    log_decay_ = log_decay + (int64_t(b) * n.G + g) * S * tokens_;
    for_each_block(n, [&](int block, int64_t t, int count) {
      load_transposed(value_scale.at(b, t, g), value_scale.token, S, count, 1.0f,
                      value_scale_ + int64_t(block) * S * C_, C_);
    });
  }

  void load_queries(const Tokens<const float>& output_scale, int b, int64_t t, int h, int count,
                    int block, int first) {
    block_ = block;
    load_transposed(output_scale.at(b, t, h), output_scale.token, S, count, 1.0f, output_scale_,
                    kSpan);
    spans_.clear();
    for (int n = 0; n < S; ++n) {
      spans_.emplace_back(decays(n, block), C_, first);
      for (int half = 0; half < 2; ++half) {
        store(after_ + n * kSpan + half * kLanes, spans_[n].after(half));
      }
    }
  }

  // Loads the scales and decays of the keys of a block, which is not after that of the queries.
  void load_keys(int block) {
    is_own_ = block == block_;
    for (int n = 0; n < S; ++n) {
      float* const decay = key_decay_ + n * round_up(C_);
      if (is_own_) {
        std::fill_n(decay, C_, 1.0f);
      } else {
        decays_before(decays(n, block), decays(n, block_), C_, decay);
      }
      const float* const scale = value_scale_ + (int64_t(block) * S + n) * C_;
      for (int i = 0; i < C_; ++i) key_scale_[n * C_ + i] = scale[i] * decay[i];
    }
  }

  // exp(G_tn − G_in) without the part in key_decay.
  Vector decay(int n, int half, int i) const {
    return is_own_ ? spans_[n].since(decays(n, block_)[i], half)
                   : load(after_ + n * kSpan + half * kLanes);
  }

  // x, or 0 where key i is in the future.
  Vector causal(Vector x, int half, int i) const {
    return is_own_ ? spans_[0].present(x, half, i) : x;
  }

  float key_decay(int n, int i) const { return key_decay_[n * round_up(C_) + i]; }
  float key_scale(int n, int i) const { return key_scale_[n * C_ + i]; }  // b_in, faded
  Vector output_scale(int n, int half) const {
    return load(output_scale_ + n * kSpan + half * kLanes);
  }

  const int S;

 private:
  const double* decays(int n, int block) const {
    return log_decay_ + n * tokens_ + int64_t(block) * C_;
  }

  const int C_;
  const int64_t tokens_;
  float* const value_scale_;   // (blocks, S, C)
  float* const key_scale_;     // (S, C)
  float* const key_decay_;     // (S, C), each rounded up
  float* const output_scale_;  // (S, kSpan)
  float* const after_;         // (S, kSpan) decays from the first token of the queries' block
  const double* log_decay_ = nullptr;
  std::vector<Span> spans_;
  int block_ = 0;
  bool is_own_ = false;
};

// sum (V, kSpan), as attend_span.
template <int Degree>
void add_sums_span(const Row& row, GatedSums& sums, int block, int first, const float* query,
                   float* weights, float* sum) {
  const int V = row.V - 1, K = row.K, C = row.C;
  std::fill_n(sum, size_t(V) * kSpan, 0.0f);
  for (int other = 0; other <= block; ++other) {
    const int keys = other == block ? std::min(C, first + kSpan) : C;
    sums.load_keys(other);
    multiply(keys, row.k + other * row.k_stride, 1, C, query, kSpan, K, weights, kSpan, 0.0f);
    for (int i = 0; i < keys; ++i) {
      for (int half = 0; half < 2; ++half) {
        Vector coefficient = {};
        for (int n = 0; n < sums.S; ++n) {
          coefficient += sums.output_scale(n, half) * sums.decay(n, half, i) * sums.key_scale(n, i);
        }
        float* const at = weights + i * kSpan + half * kLanes;
        store(at, sums.causal(power<Degree>(load(at)) * coefficient, half, i));
      }
    }
    multiply(V, row.values + other * row.values_stride, C, 1, weights, kSpan, keys, sum, kSpan, 1.0f);
  }
}

// As attend_span_backward; it also adds to doutput_scale (S, kSpan) and dvalue_scale (blocks, S, C).
template <int Degree>
void add_sums_span_backward(const Row& row, GatedSums& sums, int block, int first,
                            const float* query, const float* dsum, const Weights& own,
                            float* dquery, float* dk, float* dvalues, float* doutput_scale,
                            float* dvalue_scale) {
  const int V = row.V - 1, K = row.K, C = row.C;
  float *const weights = own.weights, *const dscores = own.dscores;
  std::fill_n(dquery, size_t(K) * kSpan, 0.0f);
  for (int other = 0; other <= block; ++other) {
    const int keys = other == block ? std::min(C, first + kSpan) : C;
    const float* const k = row.k + other * row.k_stride;
    float* const dscales = dvalue_scale + int64_t(other) * sums.S * C;
    sums.load_keys(other);
    multiply(keys, k, 1, C, query, kSpan, K, weights, kSpan, 0.0f);
    multiply(keys, row.values + other * row.values_stride, 1, C, dsum, kSpan, V, dscores, kSpan,
             0.0f);
    for (int i = 0; i < keys; ++i) {
      Vector coefficient[2] = {}, dcoefficient[2];
      for (int half = 0; half < 2; ++half) {
        const int at = i * kSpan + half * kLanes;
        const Vector change = power<Degree>(load(weights + at)) * load(dscores + at);
        dcoefficient[half] = sums.causal(change, half, i);
      }
      for (int n = 0; n < sums.S; ++n) {
        Vector change = {};
        for (int half = 0; half < 2; ++half) {
          const Vector decay = sums.decay(n, half, i), faded = sums.output_scale(n, half) * decay;
          float* const to = doutput_scale + n * kSpan + half * kLanes;
          store(to, load(to) + dcoefficient[half] * decay * sums.key_scale(n, i));
          coefficient[half] += faded * sums.key_scale(n, i);
          change += dcoefficient[half] * faded;
        }
        float total = 0.0f;
        for (int lane = 0; lane < kLanes; ++lane) total += change[lane];
        dscales[n * C + i] += total * sums.key_decay(n, i);
      }
      for (int half = 0; half < 2; ++half) {
        const int at = i * kSpan + half * kLanes;
        const Vector score = load(weights + at), dweight = load(dscores + at) * coefficient[half];
        store(weights + at, sums.causal(power<Degree>(score) * coefficient[half], half, i));
        store(dscores + at, sums.causal(power_gradient<Degree>(score, dweight), half, i));
      }
    }
    multiply(K, k, C, 1, dscores, kSpan, keys, dquery, kSpan, 1.0f);
    add_transposed(query, K, dscores, keys, C, own.transposed, own.product,
                   dk + other * row.k_stride);
    add_transposed(dsum, V, weights, keys, C, own.transposed, own.product,
                   dvalues + other * row.values_stride);
  }
}

}  // namespace

extern "C" {

// Writes out (B, T, H, V). log_decay (B, G, S, blocks · C), value_scale (B, T, G, S) and output_scale
// (B, T, H, S).
void gated_sums(const Tokens<const float>* q, const Tokens<const float>* k,
                const Tokens<const float>* v, const double* log_decay,
                const Tokens<const float>* value_scale, const Tokens<const float>* output_scale,
                const Tokens<float>* out, const Sizes* sizes, int threads) {
  const Sizes& n = *sizes;
  const int V = n.V, K = n.K;
#pragma omp parallel num_threads(std::min(threads, n.B * n.G))
  {
    const FlushDenormals flushing;
    Scratch scratch(Head::size(n) + GatedSums::size(n.S, n) + size_t(K + V) * kSpan +
                    Weights::size(V + 1, K, n.C));
    float* const query = scratch.take(size_t(K) * kSpan);
    float* const sum = scratch.take(size_t(V) * kSpan);
    const Weights own(scratch, V + 1, K, n.C);
    const Head head(scratch, n);
    GatedSums sums(scratch, n.S, n);
#pragma omp for collapse(2) schedule(dynamic)
    for (int b = 0; b < n.B; ++b) {
      for (int g = 0; g < n.G; ++g) {
        const Row row = head.load(*k, *v, nullptr, b, g);
        sums.load_head(*value_scale, log_decay, n, b, g);
        for_each_span(n, g, [&](int h, int block, int first, int64_t t, int count) {
          load_transposed(q->at(b, t, h), q->token, K, count, n.scale, query, kSpan);
          sums.load_queries(*output_scale, b, t, h, count, block, first);
          for_degree(n.degree, [&](auto p) {
            add_sums_span<p>(row, sums, block, first, query, own.weights, sum);
          });
          store_transposed(sum, kSpan, V, count, 1.0f, out->at(b, t, h), out->token);
        });
      }
    }
  }
}

// From dout the gradients of all but log_decay, which follow from those of the scales.
void gated_sums_backward(const Tokens<const float>* q, const Tokens<const float>* k,
                         const Tokens<const float>* v, const double* log_decay,
                         const Tokens<const float>* value_scale,
                         const Tokens<const float>* output_scale, const Tokens<const float>* dout,
                         const Tokens<float>* dq, const Tokens<float>* dk, const Tokens<float>* dv,
                         const Tokens<float>* dvalue_scale, const Tokens<float>* doutput_scale,
                         const Sizes* sizes, int threads) {
  const Sizes& n = *sizes;
  const int V = n.V, K = n.K, C = n.C, S = n.S;
#pragma omp parallel num_threads(std::min(threads, n.B * n.G))
  {
    const FlushDenormals flushing;
    Scratch scratch(2 * Head::size(n) + 2 * GatedSums::size(S, n) + size_t(2 * K + V) * kSpan +
                    Weights::size(V + 1, K, C));
    float* const query = scratch.take(size_t(K) * kSpan);
    float* const dquery = scratch.take(size_t(K) * kSpan);
    float* const dsum = scratch.take(size_t(V) * kSpan);
    const Weights own(scratch, V + 1, K, C);
    const Head head(scratch, n);
    GatedSums sums(scratch, S, n);
    float* const dkeys = scratch.take(Head::size(n));
    float* const dvalues = dkeys + size_t(n.blocks) * C * K;
    float* const dscales = scratch.take(size_t(n.blocks) * S * C);
    float* const dspan = scratch.take(size_t(S) * kSpan);
#pragma omp for collapse(2) schedule(dynamic)
    for (int b = 0; b < n.B; ++b) {
      for (int g = 0; g < n.G; ++g) {
        const Row row = head.load(*k, *v, nullptr, b, g);
        sums.load_head(*value_scale, log_decay, n, b, g);
        std::fill_n(dkeys, n.blocks * row.k_stride, 0.0f);
        std::fill_n(dvalues, n.blocks * row.values_stride, 0.0f);
        std::fill_n(dscales, size_t(n.blocks) * S * C, 0.0f);
        for_each_span(n, g, [&](int h, int block, int first, int64_t t, int count) {
          load_transposed(q->at(b, t, h), q->token, K, count, n.scale, query, kSpan);
          load_transposed(dout->at(b, t, h), dout->token, V, count, 1.0f, dsum, kSpan);
          sums.load_queries(*output_scale, b, t, h, count, block, first);
          std::fill_n(dspan, size_t(S) * kSpan, 0.0f);
          for_degree(n.degree, [&](auto p) {
            add_sums_span_backward<p>(row, sums, block, first, query, dsum, own, dquery, dkeys,
                                      dvalues, dspan, dscales);
          });
          store_transposed(dquery, kSpan, K, count, n.scale, dq->at(b, t, h), dq->token);
          store_transposed(dspan, kSpan, S, count, 1.0f, doutput_scale->at(b, t, h),
                           doutput_scale->token);
        });
        for_each_block(n, [&](int block, int64_t t, int count) {
          store_transposed(dkeys + block * row.k_stride, C, K, count, 1.0f, dk->at(b, t, g),
                           dk->token);
          store_transposed(dvalues + block * row.values_stride, C, V, count, 1.0f,
                           dv->at(b, t, g), dv->token);
          store_transposed(dscales + int64_t(block) * S * C, C, S, count, 1.0f,
                           dvalue_scale->at(b, t, g), dvalue_scale->token);
        });
      }
    }
  }
}

}  // extern "C"
