#include "aliases.h"

#include <ATen/Tensor.h>

namespace emu {

at::Tensor make_tensor(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like) {
  auto t = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  auto* to = t.unsafeGetTensorImpl();
  const auto* from = like.unsafeGetTensorImpl();
  if (from->dim() != 1 || from->numel() != 0 || from->storage_offset() != 0)
    to->set_sizes_and_strides(from->sizes(), from->strides(), from->storage_offset());
  if (C10_UNLIKELY(like.is_conj())) t._set_conj(true);
  if (C10_UNLIKELY(like.is_neg())) t._set_neg(true);
  return t;
}

at::Tensor cpu_alias(const at::Tensor& t) {
  auto* s = t.storage().unsafeGetStorageImpl();
  Block* b = block_of(s);
  if (b) retain(b);
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), s->nbytes(),
      c10::DataPtr(s->mutable_data(), b, &release, c10::Device(c10::DeviceType::CPU)), cpu_hook(), true);
  auto r = make_tensor(c10::Storage(std::move(storage)), c10::DispatchKey::CPU, t);
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) r.unsafeGetTensorImpl()->set_wrapped_number(true);
  return r;
}

static size_t span_bytes(const at::Tensor& t) {
  if (t.numel() == 0) return 0;
  const auto* i = t.unsafeGetTensorImpl();
  auto sizes = i->sizes();
  auto strides = i->strides();
  int64_t last = 0;
  for (size_t d = 0; d < sizes.size(); d++) last += (sizes[d] - 1) * strides[d];
  return (size_t)(last + 1) * i->itemsize();
}
race::Touch touch_of(const at::Tensor& t, bool write) {
  auto* b = block_of(t.storage().unsafeGetStorageImpl());
  size_t lo = (size_t)t.storage_offset() * t.element_size();
  return {b ? &b->log : nullptr, lo, lo + span_bytes(t), write};
}
race::Touch touch_of_pinned(const at::Tensor& t, PinnedBlock* b, bool write) {
  size_t lo = (size_t)((const char*)t.const_data_ptr() - (const char*)b->ptr);
  return {&b->log, lo, lo + span_bytes(t), write};
}

} // namespace emu
