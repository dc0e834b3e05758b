// Tensors over the same bytes: an emu tensor seen as a CPU tensor, for the CPU kernels.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKey.h>
#include <c10/util/SmallVector.h>

#include "memory.h"
#include "pinned.h"
#include "race.h"

namespace emu {

constexpr auto kEmu = c10::DeviceType::PrivateUse1;
inline bool is_emu(const at::Tensor& t) { return t.device().type() == kEmu; }

at::Tensor make_tensor(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like);
at::Tensor cpu_alias(const at::Tensor& emu_tensor); // keeps the memory alive, not the tensor
inline at::Tensor cpu_view(const at::Tensor& t) { return is_emu(t) ? cpu_alias(t) : t; }

// The bytes of its allocation that a tensor spans, from its first to its last element. A strided view counts
// with the gaps in between.
race::Touch touch_of(const at::Tensor& emu_tensor, bool write);
race::Touch touch_of_pinned(const at::Tensor& cpu_tensor, PinnedBlock* block, bool write);
using Touches = c10::SmallVector<race::Touch, 8>;

} // namespace emu
