// TensorFlow operations that exchange a gradient while backward goes on. Poseidon compiles this file on the user's
// machine, against the TensorFlow that is installed there (plugin.py). It reaches the client by c_exchange.h alone.
//
// An operation starts its exchange, and returns TensorFlow's thread at once. A thread of this file waits for the
// results and hands them to TensorFlow. Nothing here takes Python's lock.
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "poseidon/c_exchange.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;
using Done = AsyncOpKernel::DoneCallback;

constexpr std::size_t kErrorBytes = 4096;

struct Job {
  const PoseidonExchange* exchange = nullptr;  // null: this process is in no job
  int number = 0;                              // of the job among those that this process has joined
};

/// Waits for exchanges, in a thread of its own that lives as long as the process.
class Waiter {
 public:
  static Waiter& get() {
    static auto& waiter = *new Waiter;  // not destroyed: its thread outlives main
    return waiter;
  }

  /// Returns when no exchange of an earlier job is under way. Its client must have been shut down.
  void set_job(Job job) {
    std::unique_lock lock(mutex_);
    job_ = job;
    none_left_.wait(lock, [this] { return pending_.empty() && !finishing_; });
  }

  Job job() {
    const std::lock_guard lock(mutex_);
    return job_;
  }

  void add(const PoseidonExchange* exchange, std::uint32_t layer, OpKernelContext* context, Done done) {
    {
      const std::lock_guard lock(mutex_);
      pending_.push_back({exchange, layer, context, std::move(done)});
    }
    some_pending_.notify_one();
  }

 private:
  struct Pending {
    const PoseidonExchange* exchange;
    std::uint32_t layer;
    OpKernelContext* context;
    Done done;
  };

  Waiter() {
    std::thread([this] { run(); }).detach();
  }

  [[noreturn]] void run() {
    while (true) {
      finish(next());
      const std::lock_guard lock(mutex_);
      finishing_ = false;
      none_left_.notify_all();
    }
  }

  /// One that is over already, or else the oldest.
  Pending next() {
    std::unique_lock lock(mutex_);
    some_pending_.wait(lock, [this] { return !pending_.empty(); });
    auto chosen = pending_.begin();
    for (auto one = pending_.begin(); one != pending_.end(); ++one)
      if (one->exchange->done(one->exchange->client, one->layer) != 0) {
        chosen = one;
        break;
      }
    Pending found = std::move(*chosen);
    pending_.erase(chosen);
    finishing_ = true;
    return found;
  }

  static void finish(Pending pending) {
    char error[kErrorBytes];
    if (pending.exchange->wait(pending.exchange->client, pending.layer, error, sizeof error) != 0)
      pending.context->SetStatus(absl::AbortedError(error));
    pending.done();
  }

  std::mutex mutex_;
  std::condition_variable some_pending_, none_left_;
  std::deque<Pending> pending_;
  bool finishing_ = false;  // the thread waits for one that is not in `pending_` any more
  Job job_;
};

absl::Status other_job() {
  return absl::FailedPreconditionError(
      "this training step was compiled in a job that this process has left: compile the model again after "
      "poseidon.init()");
}

/// What the operations that exchange have in common.
class Exchange : public AsyncOpKernel {
 public:
  explicit Exchange(OpKernelConstruction* construction) : AsyncOpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("layer", &layer_));
    OP_REQUIRES_OK(construction, construction->GetAttr("divisor", &divisor_));
    OP_REQUIRES_OK(construction, construction->GetAttr("job", &job_number_));
  }

  void ComputeAsync(OpKernelContext* context, Done done) override {
    const Job job = Waiter::get().job();
    OP_REQUIRES_ASYNC(context, job.exchange != nullptr && job.number == job_number_, other_job(), done);
    char error[kErrorBytes];
    bool started = false;
    OP_REQUIRES_OK_ASYNC(context, start(context, *job.exchange, error, started), done);
    OP_REQUIRES_ASYNC(context, started, absl::AbortedError(error), done);
    Waiter::get().add(job.exchange, layer(), context, std::move(done));
  }

 protected:
  /// Allocates the output and starts the exchange into it. `started`: whether that worked; otherwise `error` says why.
  virtual absl::Status start(OpKernelContext* context, const PoseidonExchange& exchange, char (&error)[kErrorBytes],
                             bool& started) = 0;

  std::uint32_t layer() const { return static_cast<std::uint32_t>(layer_); }
  std::uint32_t divisor() const { return static_cast<std::uint32_t>(divisor_); }

 private:
  int layer_ = 0;
  int divisor_ = 1;
  int job_number_ = 0;
};

/// The mean of a gradient over the workers, in the gradient's own memory if nobody else needs that. The second input is
/// the number of factors of which the gradient could have been made, and -1 if it is no product.
class DenseExchange : public Exchange {
 public:
  explicit DenseExchange(OpKernelConstruction* construction) : Exchange(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("present", &present_));
  }

 protected:
  absl::Status start(OpKernelContext* context, const PoseidonExchange& exchange, char (&error)[kErrorBytes],
                     bool& started) override {
    const TensorShape shape = context->input(0).shape();
    const void* source = context->input(0).data();
    Tensor* mean = nullptr;
    TF_RETURN_IF_ERROR(context->forward_input_or_allocate_output({0}, 0, shape, &mean));
    const std::size_t size_bytes = mean->TotalBytes();
    if (mean->data() != source) std::memcpy(mean->data(), source, size_bytes);
    const std::int64_t count = context->input(1).scalar<std::int64_t>()();
    const std::uint64_t factor_count = count < 0 ? POSEIDON_NOT_FACTORABLE : static_cast<std::uint64_t>(count);
    if (present_)
      started = exchange.start(exchange.client, layer(), mean->data(), size_bytes, divisor(), factor_count, error,
                               sizeof error) == 0;
    else
      started = exchange.start_absent(exchange.client, layer(), mean->data(), size_bytes, divisor(), error,
                                      sizeof error) == 0;
    return absl::OkStatus();
  }

 private:
  bool present_ = true;
};

/// The same for the gradient transpose(left) x right, of which the factors travel.
class FactorExchange : public Exchange {
 public:
  using Exchange::Exchange;

 protected:
  absl::Status start(OpKernelContext* context, const PoseidonExchange& exchange, char (&error)[kErrorBytes],
                     bool& started) override {
    const Tensor& left = context->input(0);
    const Tensor& right = context->input(1);
    if (left.dims() != 2 || right.dims() != 2 || left.dim_size(0) != right.dim_size(0))
      return absl::InvalidArgumentError("the factors of a gradient must be matrices with as many rows as each other");
    Tensor* mean = nullptr;
    TF_RETURN_IF_ERROR(context->allocate_output(0, TensorShape({left.dim_size(1), right.dim_size(1)}), &mean));
    started = exchange.start_factors(exchange.client, layer(), left.data(), right.data(),
                                     static_cast<std::uint64_t>(left.dim_size(0)), mean->data(), mean->TotalBytes(),
                                     divisor(), error, sizeof error) == 0;
    return absl::OkStatus();
  }
};

/// Whether the layer's exchange of this step takes factors, as all ranks have found at the end of the one before.
class TakesFactors : public OpKernel {
 public:
  explicit TakesFactors(OpKernelConstruction* construction) : OpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("layer", &layer_));
    OP_REQUIRES_OK(construction, construction->GetAttr("job", &job_number_));
  }

  void Compute(OpKernelContext* context) override {
    const Job job = Waiter::get().job();
    OP_REQUIRES(context, job.exchange != nullptr && job.number == job_number_, other_job());
    const auto layer = static_cast<std::uint32_t>(layer_);
    OP_REQUIRES(context, job.exchange->done(job.exchange->client, layer) != 0,
                absl::FailedPreconditionError(
                    "a training step has come to a variable of which another one is exchanging the gradient: run the "
                    "steps of a model one after the other"));
    Tensor* takes = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({}), &takes));
    takes->scalar<bool>()() = job.exchange->takes_factors(job.exchange->client, layer) != 0;
  }

 private:
  int layer_ = 0;
  int job_number_ = 0;
};

/// What the operations of the check of the replicas have in common: where it counts the steps of a model.
class Check : public OpKernel {
 public:
  explicit Check(OpKernelConstruction* construction) : OpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("look", &number_));
    OP_REQUIRES_OK(construction, construction->GetAttr("job", &job_number_));
  }

 protected:
  /// Null in a graph of another job. Its exchanges say so.
  PoseidonLook* find() const {
    const Job job = Waiter::get().job();
    const bool is_of_job = job.exchange != nullptr && job.number == job_number_;
    return is_of_job ? job.exchange->find_look(job.exchange->client, number_) : nullptr;
  }

 private:
  std::int64_t number_ = 0;
  int job_number_ = 0;
};

/// A step begins. Gives whether it is one that looks at the parameters, by PoseidonLook, and counts it if not.
class Due : public Check {
 public:
  using Check::Check;

  void Compute(OpKernelContext* context) override {
    Tensor* due = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, tensorflow::TensorShape({}), &due));
    PoseidonLook* const look = find();
    due->scalar<bool>()() = look != nullptr && look->begun >= look->next;
    if (look != nullptr && look->begun < look->next) ++look->begun;
  }
};

/// The same for a step that looks at these parameters, before it changes them. Calls Python.
class Look : public Check {
 public:
  using Check::Check;

  void Compute(OpKernelContext* context) override {
    PoseidonLook* const look = find();
    if (look == nullptr) return;
    std::vector<const void*> arrays;
    std::vector<std::uint64_t> sizes_bytes;
    for (int i = 0; i < context->num_inputs(); ++i) {
      arrays.push_back(context->input(i).data());
      sizes_bytes.push_back(context->input(i).TotalBytes());
    }
    char error[kErrorBytes];
    const auto told = poseidon_begin_step(look, arrays.data(), sizes_bytes.data(), arrays.size(), error, sizeof error);
    OP_REQUIRES(context, told == 0, absl::AbortedError(error));
  }
};

REGISTER_OP("PoseidonDue")
    .Output("due: bool")
    .Attr("look: int")
    .Attr("job: int")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape);

REGISTER_OP("PoseidonLook")
    .Input("parameters: T")
    .Attr("T: list({float, double, half, bfloat16})")
    .Attr("look: int")
    .Attr("job: int")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs);

REGISTER_OP("PoseidonExchange")
    .Input("gradient: T")
    .Input("count: int64")
    .Output("mean: T")
    .Attr("T: {float, double, half, bfloat16, int32, int64}")
    .Attr("layer: int")
    .Attr("divisor: int")
    .Attr("job: int")
    .Attr("present: bool")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape);

REGISTER_OP("PoseidonTakesFactors")
    .Output("takes: bool")
    .Attr("layer: int")
    .Attr("job: int")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape);

REGISTER_OP("PoseidonExchangeFactors")
    .Input("left: float")
    .Input("right: float")
    .Output("mean: float")
    .Attr("layer: int")
    .Attr("divisor: int")
    .Attr("job: int")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* inference) {
      ShapeHandle left, right;
      TF_RETURN_IF_ERROR(inference->WithRank(inference->input(0), 2, &left));
      TF_RETURN_IF_ERROR(inference->WithRank(inference->input(1), 2, &right));
      inference->set_output(0, inference->Matrix(inference->Dim(left, 1), inference->Dim(right, 1)));
      return absl::OkStatus();
    });

REGISTER_KERNEL_BUILDER(Name("PoseidonDue").Device(tensorflow::DEVICE_CPU), Due);
REGISTER_KERNEL_BUILDER(Name("PoseidonLook").Device(tensorflow::DEVICE_CPU), Look);
REGISTER_KERNEL_BUILDER(Name("PoseidonTakesFactors").Device(tensorflow::DEVICE_CPU), TakesFactors);
REGISTER_KERNEL_BUILDER(Name("PoseidonExchange").Device(tensorflow::DEVICE_CPU), DenseExchange);
REGISTER_KERNEL_BUILDER(Name("PoseidonExchangeFactors").Device(tensorflow::DEVICE_CPU), FactorExchange);

}  // namespace

/// Makes `exchange` (null: none) the job of all operations that know its `number`. It must stay valid until the next
/// call returns. Returns whether the plugin knows this version of the interface.
extern "C" int poseidon_set_exchange(const PoseidonExchange* exchange, int number) {
  if (exchange != nullptr && exchange->version != POSEIDON_EXCHANGE_VERSION) return 0;
  Waiter::get().set_job({exchange, number});
  return 1;
}
