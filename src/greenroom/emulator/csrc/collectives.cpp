// torch.distributed backend for emu tensors: another backend (gloo) on CPU aliases of them, run on a
// communication stream per device, so that wait() orders the current stream and does not block the host.
#include "collectives.h"

#include <map>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "aliases.h"
#include "copies.h"
#include "streams.h"

namespace emu {

namespace {

using Tensors = std::vector<at::Tensor>;
using c10d::OpType;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

struct EmuWork final : c10d::Work {
  EmuWork(int rank, OpType type, int device, Tensors outputs, Tensors inputs)
      : Work(rank, type), device_(device), outputs_(std::move(outputs)), inputs_(std::move(inputs)) {}
  bool isCompleted() override {
    bool over = done->is_complete();
    if (over) race::host_joins(done->clock); // a host that was told so may rely on it
    return over;
  }
  bool isSuccess() const override { return done->is_complete() && !*error; }
  void synchronize() override {
    stream_wait(current_stream(device_), done);
    inputs_.clear(); // whatever is freed now is freed after the collective, in the order of the current stream
    if (done->is_complete() && *error) std::rethrow_exception(*error);
  }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void blockCurrentStream() override { synchronize(); }
  Tensors result() override { return outputs_; }
  RecordingPtr done;
  std::shared_ptr<std::exception_ptr> error = std::make_shared<std::exception_ptr>();

 private:
  int device_;
  Tensors outputs_;
  Tensors inputs_; // kept until somebody waits, as NCCL's work does: a caller may let go of its input at once
};

Tensors aliases(const Tensors& v) {
  Tensors r;
  for (auto& t : v) r.push_back(cpu_view(t));
  return r;
}
std::vector<Tensors> aliases(const std::vector<Tensors>& v) {
  std::vector<Tensors> r;
  for (auto& t : v) r.push_back(aliases(t));
  return r;
}
Tensors flat(const std::vector<Tensors>& v) {
  Tensors r;
  for (auto& t : v) r.insert(r.end(), t.begin(), t.end());
  return r;
}
size_t total_bytes(const Tensors& v) {
  size_t n = 0;
  for (auto& t : v) n += t.nbytes();
  return n;
}

class EmuBackend final : public c10d::Backend {
 public:
  explicit EmuBackend(c10::intrusive_ptr<c10d::Backend> inner) : Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)) {}
  const std::string getBackendName() const override { return "emu_gloo"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return inner_->getBackendOptions(); }
  bool supportsTimeEstimation() const override { return false; }

  WorkPtr broadcast(Tensors& t, const c10d::BroadcastOptions& o) override {
    return run(OpType::BROADCAST, t, t, [in = inner_, a = aliases(t), o]() mutable { return in->broadcast(a, o); });
  }
  WorkPtr allreduce(Tensors& t, const c10d::AllreduceOptions& o) override {
    return run(OpType::ALLREDUCE, t, t, [in = inner_, a = aliases(t), o]() mutable { return in->allreduce(a, o); });
  }
  WorkPtr reduce(Tensors& t, const c10d::ReduceOptions& o) override {
    return run(OpType::REDUCE, t, t, [in = inner_, a = aliases(t), o]() mutable { return in->reduce(a, o); });
  }
  WorkPtr allgather(std::vector<Tensors>& out, Tensors& inp, const c10d::AllgatherOptions& o) override {
    return run(OpType::ALLGATHER, flat(out), inp,
               [in = inner_, a = aliases(out), b = aliases(inp), o]() mutable { return in->allgather(a, b, o); });
  }
  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& inp, const c10d::AllgatherOptions& o) override {
    return run(OpType::_ALLGATHER_BASE, {out}, {inp},
               [in = inner_, a = cpu_view(out), b = cpu_view(inp), o]() mutable { return in->_allgather_base(a, b, o); });
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& out, Tensors& inp, const c10d::AllgatherOptions& o) override {
    return run(OpType::COALESCED, out, inp,
               [in = inner_, a = aliases(out), b = aliases(inp), o]() mutable { return in->allgather_into_tensor_coalesced(a, b, o); });
  }
  WorkPtr gather(std::vector<Tensors>& out, Tensors& inp, const c10d::GatherOptions& o) override {
    return run(OpType::GATHER, flat(out), inp,
               [in = inner_, a = aliases(out), b = aliases(inp), o]() mutable { return in->gather(a, b, o); });
  }
  WorkPtr scatter(Tensors& out, std::vector<Tensors>& inp, const c10d::ScatterOptions& o) override {
    return run(OpType::SCATTER, out, flat(inp),
               [in = inner_, a = aliases(out), b = aliases(inp), o]() mutable { return in->scatter(a, b, o); });
  }
  WorkPtr reduce_scatter(Tensors& out, std::vector<Tensors>& inp, const c10d::ReduceScatterOptions& o) override {
    return run(OpType::REDUCE_SCATTER, out, flat(inp),
               [in = inner_, a = aliases(out), b = aliases(inp), o]() mutable { return in->reduce_scatter(a, b, o); });
  }
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& inp, const c10d::ReduceScatterOptions& o) override {
    return run(OpType::_REDUCE_SCATTER_BASE, {out}, {inp},
               [in = inner_, a = cpu_view(out), b = cpu_view(inp), o]() mutable { return in->_reduce_scatter_base(a, b, o); });
  }
  WorkPtr alltoall_base(at::Tensor& out, at::Tensor& inp, std::vector<int64_t>& os, std::vector<int64_t>& is,
                        const c10d::AllToAllOptions& o) override {
    return run(OpType::ALLTOALL_BASE, {out}, {inp}, [in = inner_, a = cpu_view(out), b = cpu_view(inp), os, is, o]() mutable {
      return in->alltoall_base(a, b, os, is, o);
    });
  }
  WorkPtr alltoall(Tensors& out, Tensors& inp, const c10d::AllToAllOptions& o) override {
    return run(OpType::ALLTOALL, out, inp,
               [in = inner_, a = aliases(out), b = aliases(inp), o]() mutable { return in->alltoall(a, b, o); });
  }
  WorkPtr send(Tensors& t, int dst, int tag) override {
    return run(OpType::SEND, {}, t, [in = inner_, a = aliases(t), dst, tag]() mutable { return in->send(a, dst, tag); });
  }
  WorkPtr recv(Tensors& t, int src, int tag) override {
    return run(OpType::RECV, t, {}, [in = inner_, a = aliases(t), src, tag]() mutable { return in->recv(a, src, tag); });
  }
  WorkPtr barrier(const c10d::BarrierOptions& o) override { // blocks the host, as it does on gloo
    synchronize(current_device());
    if (vclock::on) vclock::host_reaches(latest_of_all_ranks(vclock::host_now()));
    auto options = o;
    options.device_ids.clear();
    options.device = std::nullopt;
    return inner_->barrier(options);
  }

 private:
  WorkPtr run(OpType type, const Tensors& outs, const Tensors& ins, std::function<WorkPtr()> collective) {
    TORCH_CHECK(!outs.empty() || !ins.empty(), "emu_gloo: a collective without tensors");
    int device = (outs.empty() ? ins : outs)[0].device().index();
    auto*& comm = streams_[device];
    if (!comm) comm = pool_stream(device);
    auto work = c10::make_intrusive<EmuWork>(getRank(), type, device, outs, ins);
    stream_wait(comm, record_event(current_stream(device)));
    if (race::mode) {
      Touches touches;
      for (auto& t : ins) touches.push_back(touch_of(t, false));
      for (auto& t : outs) touches.push_back(touch_of(t, true));
      race::launch(comm->gid, touches.data(), touches.size(), "collective");
    }
    size_t bytes = std::max(total_bytes(ins), total_bytes(outs));
    bool virtually = vclock::on;
    if (virtually) {
      // A collective begins when the last rank gets to it. Peer-to-peer messages are not matched up: that would
      // make the host of a sender wait for the receiver's.
      if (type != OpType::SEND && type != OpType::RECV) {
        comm->drain(comm->gid); // the inner backend matches its calls by their order: nothing may be under way
        vclock::stream_waits(comm->gid, latest_of_all_ranks(vclock::stream_end(comm->gid)));
      }
      charge_collective(device, bytes, comm->gid, "collective");
    }
    comm->enqueue([collective = std::move(collective), error = work->error, bytes, virtually, gid = comm->gid] {
      double t0 = now_s();
      try {
        collective()->wait();
      } catch (...) {
        *error = std::current_exception();
      }
      if (!virtually) finish_collective(t0, bytes, gid, "collective");
    });
    work->done = record_event(comm);
    return work;
  }

  // Ranks share one origin of virtual time: each switched it on at the same point of the program.
  vclock::Moment latest_of_all_ranks(vclock::Moment mine) {
    std::vector<at::Tensor> ps{at::full({1}, mine.ps, at::kLong)};
    c10d::AllreduceOptions max;
    max.reduceOp = c10d::ReduceOp::MAX;
    inner_->allreduce(ps, max)->wait();
    mine.ps = ps[0].item<int64_t>();
    return mine;
  }

  c10::intrusive_ptr<c10d::Backend> inner_;
  std::map<int, Stream*> streams_;
};

} // namespace

void bind_collectives(pybind11::module& m) {
  m.def("make_backend", [](const c10::intrusive_ptr<c10d::Backend>& inner) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<EmuBackend>(inner);
  });
}

} // namespace emu
