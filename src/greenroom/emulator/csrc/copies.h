// Copies over the link: one engine per device and direction, each with a bandwidth.
#pragma once
#include <atomic>

#include <ATen/core/Tensor.h>

#include "trace.h"

namespace emu {

struct Link {
  std::atomic<double> bandwidth[3];         // bytes per second by Direction, 0 = unlimited
  std::atomic<double> pageable_factor{1.0}; // share of it that copies from or to pageable memory reach
  std::atomic<double> latency{0.0};         // seconds per copy
  Link();                                   // bandwidth from the environment
};
extern Link bus;

at::Tensor copy_from(const at::Tensor& src, const at::Tensor& dst, bool non_blocking);
at::Tensor copy_from_and_resize(const at::Tensor& src, const at::Tensor& dst);
// A collective that moves so many bytes: its virtual time, or (after the work itself) the rest of its real time.
void charge_collective(int device, size_t bytes, int gid, const char* name);
void finish_collective(double started_at, size_t bytes, int gid, const char* name);

} // namespace emu
