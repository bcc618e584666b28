// What the tests of attention share on CPU and GPU: random cases of the whole contract, their
// operands in memory, a reference of plain loops, and how far a result may lie from it.
//
// The rule: computed from the same inputs, a result may err from the float64 reference by twice
// what a plain implementation in the case's dtype errs (whole rows of scores; what it would store
// is rounded to the dtype, sums are float32), and by a few float32 roundings of what was added up,
// because a plain sum of few terms is sometimes exact by luck.
#pragma once

#include <array>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/attention/attention.h"
#include "kernels/attention/dropout_mask.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/testing.h"

namespace muster::testing {

// x rounded to the dtype, to nearest even.
inline float rounded_to(DType dtype, float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  if (dtype == DType::kFloat32 || !std::isfinite(x)) return x;
  if (dtype == DType::kBFloat16) {
    return std::bit_cast<float>((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u);
  }
  // Below 2⁻¹⁴, float16 has steps of 2⁻²⁴, as float32 has beside 0.75.
  if (std::abs(x) < 0x1p-14f) return std::copysign((std::abs(x) + 0.75f) - 0.75f, x);
  const float near = std::bit_cast<float>((bits + 0xfff + ((bits >> 13) & 1)) & 0xffffe000u);
  return std::abs(near) > 65504.0f ? std::copysign(std::numeric_limits<float>::infinity(), x)
                                   : near;
}

struct AttentionCase {
  DType dtype = DType::kFloat32;
  std::vector<int32_t> ends_q{0};
  std::vector<int32_t> ends_k{0};
  int64_t heads_q = 1;
  int64_t heads_k = 1;
  int64_t width = 8;
  bool packed = false;  // q, k and v in one buffer, and so their gradients
  int64_t gap = 0;      // elements behind each row
  AttentionOptions options{};
  uint64_t seed = 1;

  int64_t total_q() const { return ends_q.back(); }
  int64_t total_k() const { return ends_k.back(); }
  float scale() const {
    return options.scale != 0.0f ? options.scale : 1.0f / std::sqrt(static_cast<float>(width));
  }
  static int64_t longest(const std::vector<int32_t>& ends) {
    int32_t most = 0;
    for (size_t i = 1; i < ends.size(); ++i) most = std::max(most, ends[i] - ends[i - 1]);
    return most;
  }
  std::string to_string() const {
    const auto list = [](const std::vector<int32_t>& ends) {
      std::string text;
      for (const int32_t end : ends) text += " " + std::to_string(end);
      return text;
    };
    return "case " + std::to_string(seed) + ": " + name_of(dtype) + ", q" + list(ends_q) + ", k" +
           list(ends_k) + ", heads " + Shape({heads_q, heads_k, width}).to_string() +
           (packed ? ", packed" : "") + ", gap " + std::to_string(gap) +
           (options.causal ? ", causal" : "") + ", window " + std::to_string(options.window_left) +
           " " + std::to_string(options.window_right) + ", cap " +
           std::to_string(options.logit_cap) + ", dropout " + std::to_string(options.dropout) +
           ", scale " + std::to_string(scale());
  }
};

// Case `seed` of an endless list that covers the contract: small, so that hundreds take seconds.
inline AttentionCase random_attention_case(uint64_t seed) {
  const CounterRng rng(seed, RandomPurpose::kInit, 7);
  uint64_t draws = 0;
  const auto below = [&](int64_t n) {
    return static_cast<int64_t>(rng.bits(draws++) % static_cast<uint64_t>(n));
  };
  const auto one_of = [&](const auto& choices) {
    return *(choices.begin() + below(static_cast<int64_t>(choices.size())));
  };
  AttentionCase c;
  c.seed = seed;
  c.dtype = one_of(std::vector{DType::kFloat32, DType::kBFloat16, DType::kFloat16});
  // Tiles are 64 keys or more: segments of none, one, few, one about a tile, several tiles.
  const auto length = [&]() -> int32_t {
    const std::vector<int64_t> choices{0, 1, 2 + below(15), 60 + below(9), 100 + below(120)};
    return static_cast<int32_t>(one_of(choices));
  };
  const bool self = below(3) != 0;
  c.ends_q = c.ends_k = {0};
  for (int64_t s = 1 + below(4); s > 0; --s) {
    const int32_t q = length();
    c.ends_q.push_back(c.ends_q.back() + q);
    c.ends_k.push_back(c.ends_k.back() + (self ? q : length()));
  }
  c.heads_k = 1 + below(3);
  c.heads_q = c.heads_k * one_of(std::vector<int64_t>{1, 1, 2, 3});
  c.width = one_of(std::vector<int64_t>{1, 7, 8, 16, 33, 40, 64, 64, 64, 100, 128, 128, 200, 256});
  const auto work = [&] {
    int64_t pairs = 0;
    for (size_t s = 0; s + 1 < c.ends_q.size(); ++s) {
      pairs += int64_t{c.ends_q[s + 1] - c.ends_q[s]} * (c.ends_k[s + 1] - c.ends_k[s]);
    }
    return pairs * c.heads_q * c.width;
  };
  constexpr int64_t kMostWork = 1 << 20;
  if (work() > kMostWork) c.heads_q = c.heads_k = 1;
  while (work() > kMostWork && c.width > 64) c.width /= 2;
  c.packed = self && below(2) == 0;
  c.gap = one_of(std::vector<int64_t>{0, 0, 8, 3});

  AttentionOptions& o = c.options;
  o.causal = below(2) == 0;
  o.deterministic = below(4) != 0;
  const auto window = [&]() -> int64_t {
    const std::vector<int64_t> choices{-1, -1, -1, 0, 1 + below(20), 20 + below(150), 100000};
    return one_of(choices);
  };
  o.window_left = window();
  o.window_right = window();
  o.logit_cap = one_of(std::vector<float>{0.0f, 0.0f, 0.5f, 3.0f, 50.0f});
  o.dropout = one_of(std::vector<float>{0.0f, 0.0f, 0.1f, 0.5f, 0.85f});
  o.dropout_seed = rng.bits(draws++);
  o.dropout_offset = one_of(std::vector<uint64_t>{0, 1, (uint64_t{1} << 40) + 2});
  o.scale = one_of(std::vector<float>{0.0f, 0.0f, 0.0f, 0.3f, -0.2f});
  return c;
}

// A case's operands. All bytes are 0xff at first: NaN in every dtype.
class AttentionOperands {
 public:
  AttentionOperands(const AttentionCase& c, Allocator& allocator)
      : case_(c), allocator_(allocator) {
    const Shape shape_q{c.total_q(), c.heads_q, c.width};
    const Shape shape_k{c.total_k(), c.heads_k, c.width};
    const auto triple = [&](TensorView& first, TensorView& second, TensorView& third) {
      if (c.packed) return place(c, {{&first, shape_q}, {&second, shape_k}, {&third, shape_k}});
      place(c, {{&first, shape_q}});
      place(c, {{&second, shape_k}, {&third, shape_k}});
    };
    triple(q, k, v);
    place(c, {{&out, shape_q}});
    place(c, {{&grad_out, shape_q}});
    triple(grad_q, grad_k, grad_v);
    lse = allocate({c.heads_q, c.total_q()}, DType::kFloat32);
    cu_q = allocate({static_cast<int64_t>(c.ends_q.size())}, DType::kInt32);
    cu_k = allocate({static_cast<int64_t>(c.ends_k.size())}, DType::kInt32);
  }
  Segments segments() const {
    const AttentionCase& c = case_;
    return {cu_q, cu_k, AttentionCase::longest(c.ends_q), AttentionCase::longest(c.ends_k)};
  }
  // Inputs of the case's seed, exact in its dtype (host memory only).
  void fill() const {
    const AttentionCase& c = case_;
    std::copy(c.ends_q.begin(), c.ends_q.end(), cu_q.data<int32_t>());
    std::copy(c.ends_k.begin(), c.ends_k.end(), cu_k.data<int32_t>());
    uint64_t stream = 0;
    for (const TensorView& view : {q, k, v, grad_out}) {
      const CounterRng rng(c.seed, RandomPurpose::kInit, ++stream);
      std::vector<float> values(view.numel());
      for (size_t i = 0; i < values.size(); ++i) {
        values[i] = rounded_to(c.dtype, static_cast<float>(rng.normal(i)));
      }
      write(view, values);
    }
  }
  // Equal scores and one-hot rows: where every head has its own keys and D is not less than the
  // number of tokens, out[i, h, j] and grad_v[j, h, i] are not 0 exactly where query i sees key j
  // and keeps it.
  void fill_one_hot() const {
    fill();
    write(q, std::vector<float>(q.numel(), 0.0f));
    for (const TensorView& view : {v, grad_out}) {
      std::vector<float> rows(view.numel(), 0.0f);
      for (int64_t i = 0; i < view.size(0) * view.size(1); ++i) {
        rows[i * view.size(2) + i / view.size(1)] = 1.0f;
      }
      write(view, rows);
    }
  }
  // The inputs of another object of the same case, each moved by up to one part in 64.
  void fill_near(const AttentionOperands& other, uint64_t seed) const {
    const auto move = [&](const TensorView& to, const TensorView& from, uint64_t stream) {
      const CounterRng rng(seed, RandomPurpose::kInit, stream);
      std::vector<float> values = read(from);
      for (size_t i = 0; i < values.size(); ++i) {
        const double factor = 1.0 + (2.0 * rng.uniform(i) - 1.0) / 64.0;
        values[i] = rounded_to(case_.dtype, static_cast<float>(values[i] * factor));
      }
      write(to, values);
    };
    move(q, other.q, 1);
    move(k, other.k, 2);
    move(v, other.v, 3);
    move(grad_out, other.grad_out, 4);
  }
  void forward(const Stream& stream, const AttentionOptions& options) const {
    attention_forward(stream, out, lse, q, k, v, segments(), options);
  }
  void backward(const Stream& stream, const AttentionOptions& options) const {
    attention_backward(stream, grad_q, grad_k, grad_v, grad_out, q, k, v, out, lse, segments(),
                       options);
  }
  // Elements of a [tokens, heads, D] view in host memory, row-major.
  static std::vector<float> read(const ConstTensorView& view) {
    const Tensor values({view.numel()}, DType::kFloat32);
    const Tensor packed({view.numel()}, view.dtype());
    each_row(view, packed, [](char* row, char* to, size_t bytes) { std::memcpy(to, row, bytes); });
    copy_cast(Stream::cpu(), values, packed);
    return {values.data<float>(), values.data<float>() + view.numel()};
  }
  static void write(const ConstTensorView& view, const std::vector<float>& from) {
    const Tensor values({view.numel()}, DType::kFloat32);
    std::copy(from.begin(), from.end(), values.data<float>());
    const Tensor packed({view.numel()}, view.dtype());
    copy_cast(Stream::cpu(), packed, values);
    each_row(view, packed, [](char* row, char* at, size_t bytes) { std::memcpy(row, at, bytes); });
  }
  // What lies between the rows of outputs is as it was made (host memory only; destroys outputs).
  void expect_gaps_untouched() const {
    for (const TensorView& view : {q, k, v, out, grad_out, grad_q, grad_k, grad_v}) {
      const Tensor packed({view.numel()}, view.dtype());
      each_row(view, packed, [](char* row, char*, size_t bytes) { std::memset(row, 0xff, bytes); });
    }
    for (size_t i = 0; i < rows_; ++i) {
      const auto* bytes = static_cast<const unsigned char*>(memory[i].view().raw());
      const bool same = std::all_of(bytes, bytes + memory[i].bytes(),
                                    [](unsigned char byte) { return byte == 0xff; });
      EXPECT_TRUE(same) << "gaps of buffer " << i;
    }
  }

  TensorView q, k, v, out, grad_out, grad_q, grad_k, grad_v, lse, cu_q, cu_k;
  std::vector<Tensor> memory;  // of two objects of the same case, in the same order

 private:
  struct Part {
    TensorView* view;
    Shape shape;
  };
  TensorView allocate(Shape shape, DType dtype) {
    memory.emplace_back(shape, dtype, allocator_);
    if (allocator_.device().is_cpu()) {
      std::memset(memory.back().view().raw(), 0xff, memory.back().bytes());
    }
    return memory.back();
  }
  // Views that lie side by side in the rows of one buffer.
  void place(const AttentionCase& c, const std::vector<Part>& parts) {
    int64_t row = c.gap;
    for (const Part& part : parts) row += part.shape[1] * part.shape[2];
    const TensorView buffer = allocate({parts[0].shape[0], row}, c.dtype);
    rows_ = memory.size();
    int64_t at = 0;
    for (const Part& part : parts) {
      const int64_t size = static_cast<int64_t>(size_of(c.dtype));
      *part.view = TensorView(static_cast<char*>(buffer.raw()) + at * size, c.dtype, part.shape,
                              {row, c.width, 1}, buffer.device());
      at += part.shape[1] * part.shape[2];
    }
  }
  template <typename F>
  static void each_row(const ConstTensorView& view, const Tensor& packed, F f) {
    const size_t element = size_of(view.dtype());
    const size_t bytes = static_cast<size_t>(view.size(1) * view.size(2)) * element;
    auto* data = static_cast<char*>(const_cast<void*>(view.raw()));
    auto* at = static_cast<char*>(packed.view().raw());
    for (int64_t i = 0; i < view.size(0); ++i, at += bytes) {
      f(data + static_cast<size_t>(i * view.stride(0)) * element, at, bytes);
    }
  }

  AttentionCase case_;
  Allocator& allocator_;
  size_t rows_ = 0;
};

template <typename T>
struct AttentionResult {
  std::vector<T> out, lse, grad_q, grad_k, grad_v;
};

template <typename T>
struct AttentionInputs {
  std::vector<T> q, k, v, grad_out;
};

// Whole rows of scores, softmax as written in the text book, and its gradients. `stored` is applied
// to what an implementation of one operation after another would store, the output among it, from
// which the contract's backward starts. `sizes`, if any, gets the
// sums of the magnitudes of what is added up for each element.
template <typename T, typename Stored>
AttentionResult<T> plain_attention(const AttentionCase& c, const AttentionInputs<T>& x,
                                   Stored stored, AttentionResult<T>* sizes = nullptr) {
  const int64_t d = c.width;
  const AttentionOptions& o = c.options;
  const T scale = c.scale();
  const T cap = o.logit_cap;
  const DropoutMask mask(o.dropout, o.dropout_seed, o.dropout_offset);
  const T kept = T(1) / (T(1) - T(o.dropout));
  const auto zeros = [&] {
    return AttentionResult<T>{std::vector<T>(x.q.size()), std::vector<T>(c.heads_q * c.total_q()),
                              std::vector<T>(x.q.size()), std::vector<T>(x.k.size()),
                              std::vector<T>(x.v.size())};
  };
  AttentionResult<T> r = zeros();
  AttentionResult<T> size = zeros();
  std::fill(r.lse.begin(), r.lse.end(), -std::numeric_limits<T>::infinity());
  std::vector<T> score, slope, p, factor, grad_p;
  for (size_t s = 0; s + 1 < c.ends_q.size(); ++s) {
    const int64_t q_count = c.ends_q[s + 1] - c.ends_q[s];
    const int64_t k_count = c.ends_k[s + 1] - c.ends_k[s];
    for (int64_t i = 0; i < q_count; ++i) {
      const int64_t position = i + k_count - q_count;
      std::vector<int64_t> seen;
      for (int64_t j = 0; j < k_count; ++j) {
        if (o.causal && j > position) continue;
        if (o.window_left >= 0 && j < position - o.window_left) continue;
        if (o.window_right >= 0 && j > position + o.window_right) continue;
        seen.push_back(c.ends_k[s] + j);
      }
      if (seen.empty()) continue;
      const size_t n = seen.size();
      const int64_t query = c.ends_q[s] + i;
      for (int64_t head = 0; head < c.heads_q; ++head) {
        const int64_t row = (query * c.heads_q + head) * d;
        const int64_t k_head = head / (c.heads_q / c.heads_k);
        const auto key_row = [&](size_t j) { return (seen[j] * c.heads_k + k_head) * d; };
        for (auto* values : {&score, &slope, &p, &factor, &grad_p}) values->assign(n, T(0));
        for (size_t j = 0; j < n; ++j) {
          const int64_t key = key_row(j);
          T product = 0;
          for (int64_t e = 0; e < d; ++e) product += x.q[row + e] * x.k[key + e];
          score[j] = stored(product * scale);
          slope[j] = T(1);
          if (cap > 0) {
            const T t = std::tanh(score[j] / cap);
            score[j] = stored(cap * t);
            slope[j] = T(1) - t * t;
          }
          factor[j] = mask.keeps(query, head, seen[j]) ? kept : T(0);
        }
        const T top = *std::max_element(score.begin(), score.end());
        T sum = 0;
        for (const T value : score) sum += std::exp(value - top);
        r.lse[head * c.total_q() + query] = top + std::log(sum);
        size.lse[head * c.total_q() + query] = std::abs(top) + std::log(sum) + T(1);
        T delta = 0;
        T delta_size = 0;
        std::vector<T> grad_p_size(n);
        for (size_t j = 0; j < n; ++j) {
          const int64_t key = key_row(j);
          p[j] = stored(std::exp(score[j] - top) / sum);
          const T dropped = stored(p[j] * factor[j]);
          for (int64_t e = 0; e < d; ++e) {
            const T term = x.grad_out[row + e] * x.v[key + e];
            r.out[row + e] += dropped * x.v[key + e];
            grad_p[j] += term;
            r.grad_v[key + e] += dropped * x.grad_out[row + e];
            if (sizes == nullptr) continue;
            size.out[row + e] += std::abs(dropped * x.v[key + e]);
            size.grad_v[key + e] += std::abs(dropped * x.grad_out[row + e]);
            grad_p_size[j] += std::abs(term * factor[j]);
          }
          grad_p[j] = stored(stored(grad_p[j]) * factor[j]);
          delta_size += p[j] * grad_p_size[j];
        }
        for (int64_t e = 0; e < d; ++e) delta += x.grad_out[row + e] * stored(r.out[row + e]);
        for (size_t j = 0; j < n; ++j) {
          const int64_t key = key_row(j);
          const T grad = stored(stored(p[j] * (grad_p[j] - delta)) * slope[j]) * scale;
          const T grad_size = std::abs(p[j] * (grad_p_size[j] + delta_size) * slope[j] * scale);
          for (int64_t e = 0; e < d; ++e) {
            r.grad_q[row + e] += grad * x.k[key + e];
            r.grad_k[key + e] += grad * x.q[row + e];
            if (sizes == nullptr) continue;
            size.grad_q[row + e] += grad_size * std::abs(x.k[key + e]);
            size.grad_k[key + e] += grad_size * std::abs(x.q[row + e]);
          }
        }
      }
    }
  }
  for (auto* values : {&r.out, &r.grad_q, &r.grad_k, &r.grad_v}) {
    for (T& value : *values) value = stored(value);
  }
  if (sizes != nullptr) *sizes = size;
  return r;
}

// float64, nothing rounded.
inline AttentionResult<double> reference_attention(const AttentionCase& c,
                                                   const AttentionInputs<double>& x,
                                                   AttentionResult<double>* sizes = nullptr) {
  return plain_attention(
      c, x, [](double value) { return value; }, sizes);
}

inline AttentionResult<float> result_of(const AttentionOperands& on_host) {
  const float* lse = on_host.lse.data<float>();
  return {AttentionOperands::read(on_host.out),
          {lse, lse + on_host.lse.numel()},
          AttentionOperands::read(on_host.grad_q),
          AttentionOperands::read(on_host.grad_k),
          AttentionOperands::read(on_host.grad_v)};
}

// What a result from the inputs of `operands` should be, and for each of its five parts what the
// plain implementation errs and a few roundings of what was added up.
struct AttentionBounds {
  AttentionResult<double> want;
  std::array<double, 5> plain{};
  std::array<double, 5> floor{};
};
template <typename T>
std::array<const std::vector<T>*, 5> parts_of(const AttentionResult<T>& r) {
  return {&r.out, &r.lse, &r.grad_q, &r.grad_k, &r.grad_v};
}
inline AttentionBounds bounds_of(const AttentionCase& c, const AttentionOperands& operands) {
  const auto inputs = [&]<typename T>(T) {
    const auto values = [](const ConstTensorView& view) {
      const std::vector<float> read = AttentionOperands::read(view);
      return std::vector<T>(read.begin(), read.end());
    };
    return AttentionInputs<T>{values(operands.q), values(operands.k), values(operands.v),
                              values(operands.grad_out)};
  };
  AttentionBounds bounds;
  AttentionResult<double> sizes;
  bounds.want = reference_attention(c, inputs(0.0), &sizes);
  const AttentionResult<float> plain =
      plain_attention(c, inputs(0.0f), [&](float x) { return rounded_to(c.dtype, x); });
  for (size_t i = 0; i < 5; ++i) {
    bounds.plain[i] = max_error(*parts_of(plain)[i], *parts_of(bounds.want)[i]);
    const std::vector<double>& size = *parts_of(sizes)[i];
    if (!size.empty()) bounds.floor[i] = 8 * 0x1p-24 * *std::max_element(size.begin(), size.end());
  }
  return bounds;
}

// The rule above, for a result from the inputs of `operands` (host memory). Where few elements
// decide, one plain error says little: what misses it is held against the largest of four, of
// inputs that are moved by less than 2 % and so rounded otherwise.
inline void expect_attention(const AttentionCase& c, const AttentionResult<float>& got,
                             const AttentionOperands& operands) {
  AttentionBounds bounds = bounds_of(c, operands);
  std::array<double, 5> error{};
  const auto within = [&] {
    for (size_t i = 0; i < 5; ++i) {
      if (!(error[i] <= 2.0 * bounds.plain[i] + bounds.floor[i])) return false;
    }
    return true;
  };
  for (size_t i = 0; i < 5; ++i) {
    error[i] = max_error(*parts_of(got)[i], *parts_of(bounds.want)[i]);
  }
  for (uint64_t trial = 1; trial < 4 && !within(); ++trial) {
    const AttentionOperands moved(c, host_allocator());
    moved.fill_near(operands, trial);
    const AttentionBounds bound = bounds_of(c, moved);
    for (size_t i = 0; i < 5; ++i) bounds.plain[i] = std::max(bounds.plain[i], bound.plain[i]);
  }
  constexpr std::array<const char*, 5> kNames{"out", "lse", "grad_q", "grad_k", "grad_v"};
  for (size_t i = 0; i < 5; ++i) {
    EXPECT_LE(error[i], 2.0 * bounds.plain[i] + bounds.floor[i])
        << kNames[i] << ", plain error " << bounds.plain[i] << "; " << c.to_string();
  }
}

}  // namespace muster::testing
