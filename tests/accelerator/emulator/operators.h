// The few operators that are not kernels, or that the fallback cannot run.
#pragma once

#include "host.h"
#include "kernels.h"

#include <ATen/EmptyTensor.h>
#include <ATen/native/transformers/attention.h>

namespace {

Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(emu(-1)));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &emu_allocator,
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype),
                                   format);
}

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(emu(-1)));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           &emu_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

Tensor bytes_of(const Tensor& t) { return on_emu(t) ? cpu_alias(t) : t; }

// Between two devices: on the source's current stream, which waits for the destination's first, and is waited for.
void copy_on_device(const Tensor& from, const Tensor& to) {
  const auto source = current_key(from.device().index());
  const auto target = current_key(to.device().index());
  const bool crosses = source.device != target.device;
  Recording ready, done;
  if (crosses) {
    record(ready, target);
    wait(ready, source);
  }
  drain(source);
  {
    Silence here;
    bytes_of(to).copy_(bytes_of(from));
  }
  log_kernel(source, "copy", span(block_of(from.storage()), from), span(block_of(to.storage()), to));
  if (crosses) {
    record(done, source);
    wait(done, target);
  }
}

// Between device and host, as CUDA does it: with pageable memory the host waits until its own memory is done with. With
// pinned memory it waits only where it is told to, or where the host itself has to convert or to lay out the values.
void copy_across(const Tensor& from, const Tensor& to, bool non_blocking) {
  const bool to_host = !on_emu(to);
  const Tensor& of_host = to_host ? to : from;
  auto* host_block = pinned_block_of(of_host);
  const bool direct = of_host.is_contiguous() && (from.scalar_type() == to.scalar_type() || to_host);
  const auto key = current_key((to_host ? from : to).device().index());
  if (!to_host && !direct) log_host_access("copy_", span(host_block, from), "");
  drain(key);
  {
    Silence here;
    bytes_of(to).copy_(bytes_of(from));
  }
  if (to_host) {
    const bool waits = !non_blocking || host_block == nullptr || !direct;
    log_kernel(key, "copy to host", span(block_of(from.storage()), from), direct ? span(host_block, to) : "");
    if (waits) host_waits(key, "copy to host");
    if (!direct) log_host_access("copy_", "", span(host_block, to));
  } else {
    log_kernel(key, "copy from host", direct ? span(host_block, from) : "", span(block_of(to.storage()), to));
    if (!non_blocking) host_waits(key, "copy from host");
  }
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  on_emu(from) && on_emu(to) ? copy_on_device(from, to) : copy_across(from, to, non_blocking);
  return to;
}

const Tensor& resize(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  const auto bytes = static_cast<size_t>((self.storage_offset() + self.numel()) * self.itemsize());
  if (bytes > self.storage().nbytes()) resize_storage(self.storage(), bytes);
  return self;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

Tensor& set_storage_at(Tensor& self, c10::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                       c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (stride.empty() && !sizes.empty()) {
    impl->set_sizes_contiguous(sizes);
    impl->set_storage_offset(offset.expect_int());
  } else {
    impl->set_sizes_and_strides(sizes, C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  }
  return self;
}

Tensor& set_storage(Tensor& self, c10::Storage source) {
  const auto n = static_cast<int64_t>(source.nbytes() / self.itemsize());
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(0);
  impl->set_sizes_contiguous({n});
  return self;
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source.storage());
  impl->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
  return self;
}

Tensor& set_empty(Tensor& self) {
  c10::DeviceGuard guard(self.device());
  return set_storage(self, c10::Storage(c10::Storage::use_byte_size_t(), 0, emu_allocator.allocate(0), &emu_allocator,
                                        /*resizable=*/true));
}

void record_stream(Tensor& self, c10::Stream stream) { keep_for(self.storage().data_ptr(), key_of(stream)); }

// Without this, model.to("emu") makes new parameters and unties tied ones, which model.to("cuda") does not.
bool has_compatible_shallow_copy_type(const Tensor& self, const Tensor& from) {
  auto dense = [](const Tensor& t) { return t.layout() == at::kStrided && (on_emu(t) || t.device().is_cpu()); };
  return (dense(self) && dense(from)) ||
      self.unsafeGetTensorImpl()->has_compatible_shallow_copy_type(from.unsafeGetTensorImpl()->key_set());
}

// The CPU's own dropout. For other devices torch has another, which rounds in another way.
Tensor dropout(const Tensor& input, double p, bool train) {
  TORCH_CHECK(p >= 0 && p <= 1, "dropout probability has to be between 0 and 1, but got ", p);
  if (p == 0 || !train || input.sym_numel() == 0) return input;
  if (p == 1) return input * at::zeros({}, input.options());
  return input * at::empty_like(input).bernoulli_(1 - p).div_(1 - p);
}
Tensor& dropout_in_place(Tensor& input, double p, bool train) {
  if (p == 0 || !train || input.sym_numel() == 0) return input;
  if (p == 1) return input.mul_(at::zeros({}, input.options()));
  return input.mul_(at::empty_like(input).bernoulli_(1 - p).div_(1 - p));
}

int64_t choose_attention(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& mask,
                         double dropout_p, bool causal, std::optional<double> scale, bool gqa) {
  Silence here;
  std::optional<Tensor> mask_of_cpu;
  if (mask) mask_of_cpu = bytes_of(*mask).set_requires_grad(mask->requires_grad() && mask->is_floating_point());
  return at::_fused_sdp_choice(bytes_of(q), bytes_of(k), bytes_of(v), mask_of_cpu, dropout_p, causal, scale, gqa);
}

// Recurrent cells: torch takes another device's to be one kernel, which the CPU does not have. The last result is what
// that kernel's own backward would need.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input, const Tensor& hidden, const Tensor& c,
                                             const std::optional<Tensor>& input_bias,
                                             const std::optional<Tensor>& hidden_bias) {
  const auto gates = (input_bias ? hidden + *hidden_bias : hidden) + (input_bias ? input + *input_bias : input);
  const auto parts = gates.chunk(4, 1);
  const auto next = parts[1].sigmoid() * c + parts[0].sigmoid() * parts[2].tanh();
  return {parts[3].sigmoid() * next.tanh(), next, gates.detach()};
}
std::tuple<Tensor, Tensor> gru_cell(const Tensor& input, const Tensor& hidden, const Tensor& h,
                                    const std::optional<Tensor>& input_bias,
                                    const std::optional<Tensor>& hidden_bias) {
  const auto of_input = (input_bias ? input + *input_bias : input).chunk(3, 1);
  const auto of_hidden = (hidden_bias ? hidden + *hidden_bias : hidden).chunk(3, 1);
  const auto reset = (of_hidden[0] + of_input[0]).sigmoid();
  const auto fresh = (of_input[2] + of_hidden[2] * reset).tanh();
  return {(h - fresh) * (of_hidden[1] + of_input[1]).sigmoid() + fresh, reset.detach()};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage_at);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_empty);
  m.impl("record_stream", &record_stream);
  m.impl("_has_compatible_shallow_copy_type", &has_compatible_shallow_copy_type);
  // "convolution": for devices that torch does not know, the composite one asks for convolution_overrideable.
  for (const char* name : {"convolution", "convolution_backward"}) m.impl(name, fallback());
  prefer_kernels_of(c10::DispatchKey::CPU, m,
                    {"empty", "empty_strided", "_copy_from", "_copy_from_and_resize", "resize_", "set_",
                     "record_stream", "_has_compatible_shallow_copy_type", "convolution", "convolution_backward",
                     "copy_", "_to_copy", "pin_memory", "_pin_memory", "is_pinned"});
}

// torch resolves a conjugated source by a copy, which is this operator again. The CPU's copy knows what is conjugated.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
  prefer_kernels_of(c10::DispatchKey::SparseCPU, m, {"is_pinned", "_pin_memory", "_to_copy", "_sparse_coo_tensor_unsafe"});
}

// torch 2.6 does not know what autograd is to do where an operator has no gradient.
TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, m) {
  if (!c10::Dispatcher::singleton().hasBackendFallbackForDispatchKey(c10::DispatchKey::AutogradPrivateUse1))
    m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_has_compatible_shallow_copy_type", &has_compatible_shallow_copy_type);
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_gru_cell", &gru_cell);
  m.impl("dropout", &dropout);
  m.impl("dropout_", &dropout_in_place);
}

} // namespace

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &choose_attention)
}
