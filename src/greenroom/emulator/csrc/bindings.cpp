// The extension module: what the Python half (torch.emu) is made of.
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "aliases.h"
#include "backend.h"
#include "collectives.h"
#include "copies.h"
#include "faults.h"
#include "generator.h"
#include "memory.h"
#include "meta_guard.h"
#include "ops.h"
#include "pinned.h"
#include "race.h"
#include "streams.h"

namespace py = pybind11;
using namespace emu;

static void bind_devices(py::module& m) {
  // Waiting releases Python's lock: another thread may have to run for the wait to end.
  m.def("device_count", &device_count);
  m.def("current_device", &current_device);
  m.def("set_device", &set_device);
  m.def("synchronize", [](int d) { synchronize(resolve_device(d)); }, py::call_guard<py::gil_scoped_release>());
  m.def("default_generator", [](int d) { return default_generator(d); });
  m.def("cpu_view", [](const at::Tensor& t) { return cpu_view(t); });
}

static void bind_memory(py::module& m) {
  m.def("set_capacity", &set_capacity);
  m.def("memory_figures", [](int d) {
    auto s = device_allocator()->getDeviceStats(resolve_device(d));
    py::dict r;
    r["allocated"] = s.allocated_bytes[0].current;
    r["allocated_peak"] = s.allocated_bytes[0].peak;
    r["reserved"] = s.reserved_bytes[0].current;
    r["reserved_peak"] = s.reserved_bytes[0].peak;
    return r;
  });
  m.def("reset_peak", [](int d) { device_allocator()->resetPeakStats(resolve_device(d)); });
  m.def("mem_get_info", [](int d) { return device_allocator()->getMemoryInfo(resolve_device(d)); });
  m.def("empty_cache", [] { device_allocator()->emptyCache(); });
  m.def("set_poison", [](bool on) { poison = on; });
  m.def("set_memory_timeline", &set_memory_timeline);
  m.def("take_memory_timeline", &take_memory_timeline);
  m.def("pinned_stats", [] {
    auto s = host_allocator()->get_stats();
    py::dict r;
    r["current"] = s.active_bytes.current;
    r["peak"] = s.active_bytes.peak;
    r["count"] = s.active_requests.current;
    return r;
  });
  m.def("register_host", [](uintptr_t address, size_t bytes) { register_pinned((void*)address, bytes); });
  m.def("unregister_host", [](uintptr_t address) { unregister_pinned((void*)address); }, py::call_guard<py::gil_scoped_release>());
  m.def("reset_peak_pinned", [] { host_allocator()->reset_peak_stats(); });
}

static void bind_time(py::module& m) {
  m.def("set_bandwidth", [](double h2d, double d2h, double p2p) {
    bus.bandwidth[H2D] = h2d;
    bus.bandwidth[D2H] = d2h;
    bus.bandwidth[P2P] = p2p;
  });
  m.def("set_pageable_factor", [](double f) { bus.pageable_factor = f; });
  m.def("set_latency", [](double s) { bus.latency = s; });
  m.def(
      "set_virtual_time",
      [](bool on, double flops, double memory_bandwidth, double launch, double kernel_latency) {
        restart_virtual_time(on);
        vclock::model.flops = flops;
        vclock::model.memory_bandwidth = memory_bandwidth;
        vclock::model.launch = launch;
        vclock::model.kernel_latency = kernel_latency;
      },
      py::call_guard<py::gil_scoped_release>());
  m.def("virtual_time", &vclock::host_seconds);
}

static void bind_checks(py::module& m) {
  m.def("set_race_mode", [](int mode) { race::mode = mode; });
  m.def("race_reports", &race::take_reports);
  m.def("host_touches", [](const at::Tensor& t, bool write, const std::string& what) {
    if (!race::mode || !t.is_cpu() || t.numel() == 0) return;
    if (auto* b = find_pinned(t.const_data_ptr(), false)) {
      auto touch = touch_of_pinned(t, b, write);
      race::host_touches(*touch.log, touch.lo, touch.hi, write, what.c_str());
    }
  });
  m.def("fail_allocation", [](int64_t k, int device) { allocation_fault.plan(k, device); });
  m.def("fail_pin", [](int64_t k) { pin_fault.plan(k); });
  m.def("fail_copy", [](int64_t k) { copy_fault.plan(k); });
}

static void bind_trace(py::module& m) {
  m.def("counters", [] {
    auto& c = trace::counters;
    py::dict r, stall;
    for (int i = 0; i < 3; i++) {
      auto key = [&](const char* what) { return py::str(std::string(kDirectionNames[i]) + what); };
      r[key("_bytes")] = c.bytes[i].load();
      r[key("_count")] = c.copies[i].load();
      r[key("_async")] = c.async_copies[i].load();
      r[key("_sync")] = c.copies[i].load() - c.async_copies[i].load();
    }
    for (const auto& s : trace::stalls()) stall[py::str(s.first)] = s.second;
    r["stall_s"] = stall;
    r["wait_s"] = stall["host"];
    r["pins"] = c.pins.load();
    r["pinned_bytes"] = c.pinned_bytes.load();
    r["unpins"] = c.unpins.load();
    r["allocations"] = c.allocations.load();
    r["fallback_calls"] = c.kernels.load();
    r["copied_outputs"] = c.copied_outputs.load();
    return r;
  });
  m.def("reset_counters", &trace::reset_counters);
  m.def("set_timeline", [](bool on) { trace::timeline_on = on; });
  m.def("take_timeline", [] {
    std::vector<std::tuple<std::string, std::string, double, double, size_t>> r;
    for (auto& s : trace::take_timeline()) r.emplace_back(s.name, trace::stream_name(s.gid), s.t0, s.t1, s.bytes);
    return r;
  });
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("init", [] {
    register_backend();
    register_meta_guards();
    return register_fallbacks();
  });
  bind_devices(m);
  bind_memory(m);
  bind_time(m);
  bind_checks(m);
  bind_trace(m);
  bind_collectives(m);
}
