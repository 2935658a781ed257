// Simulated GPUs for a CPU build of torch: README.md says what they are, and what they can't show.
#include "kernels.hpp"
#include <ATen/DeviceAccelerator.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/MPSHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <pthread.h>
#include <sstream>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

namespace {
using Maybe = std::optional<ScalarType>;
ScalarType checked(Maybe dtype) {
    ScalarType found = dtype.value_or(at::get_default_dtype_as_scalartype());
    TORCH_CHECK_TYPE(KIND != DeviceType::MPS || found != kDouble,
                     "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support "
                     "float64. Please use float32 instead.");
    return found;
}
Tensor empty(IntArrayRef size, Maybe dtype, std::optional<Layout>, std::optional<Device> d,
             std::optional<bool> pin, std::optional<MemoryFormat> format) {
    TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
    c10::DeviceGuard on(Device(KIND, index_of(*d)));
    return at::detail::empty_generic(size, &device_memory, DispatchKeySet(DispatchKey::BACKEND),
                                     checked(dtype), format);
}
Tensor empty_strided(IntArrayRef size, IntArrayRef stride, Maybe dtype, std::optional<Layout>,
                     std::optional<Device> d, std::optional<bool>) {
    c10::DeviceGuard on(Device(KIND, index_of(*d)));
    return at::detail::empty_strided_generic(size, stride, &device_memory,
                                             DispatchKeySet(DispatchKey::BACKEND), checked(dtype));
}
const Tensor &resize_(const Tensor &self, IntArrayRef size, std::optional<MemoryFormat> format) {
    auto *impl = self.unsafeGetTensorImpl();
    size_t bytes = (self.storage_offset() + c10::multiply_integers(size)) * self.dtype().itemsize();
    if (bytes > self.storage().nbytes()) grow(self.storage().unsafeGetStorageImpl(), bytes);
    impl->set_sizes_contiguous(size);
    if (format && *format != MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
    return self;
}
Tensor &set_place(Tensor &self, c10::Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
    TORCH_CHECK(source.device() == self.device(), "Attempted to set the storage of a tensor on device \"",
                self.device(), "\" to a storage on different device \"", source.device(), "\"");
    auto *impl = self.unsafeGetTensorImpl();
    impl->set_storage_keep_dtype(std::move(source));
    if (stride.data() && stride.size() == size.size())
        impl->set_sizes_and_strides(size, stride, offset);
    else {
        impl->set_sizes_contiguous(size);
        impl->set_storage_offset(offset);
    }
    return self;
}
Tensor &set_storage(Tensor &self, c10::Storage source) {
    int64_t n = source.nbytes() / self.dtype().itemsize();
    return set_place(self, std::move(source), 0, {n}, {1});
}
Tensor &set_tensor(Tensor &self, const Tensor &source) {
    return set_place(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
Tensor &set_nothing(Tensor &self) { return set_tensor(self, at::empty({0}, self.options())); }
void *base(const Tensor &t) { return t.has_storage() ? t.storage().mutable_data() : nullptr; }
uint64_t touch(const Tensor &t, Stream s, bool writes, const string &op) {
    Lock lock;
    uint64_t tick = launch(key(s));
    use(lock, base(t), key(s), tick, writes, op);
    return tick;
}
Scalar local_scalar_dense(const Tensor &self) {
    Stream s = now(self.device().index());
    waits("item");
    touch(self, s, false, "item");
    finish(s);
    return at::_local_scalar_dense(Views().cpu(self));
}
Tensor &copy_(Tensor &self, const Tensor &src, bool non_blocking) {
    if (self.is_same(src) || !self.numel()) return self;
    Views views;
    Stream s = now((on_gpu(src) ? src : self).device().index());
    if (on_gpu(self) && on_gpu(src)) {
        Key from = key(s), to = key(now(self.device().index()));
        // The source's stream copies, after what the other one has begun.
        if (from != to) {
            Lock lock;
            launch(to);
            launch(from);
            merge(clocks[from], clocks[to]);
        }
        touch(src, s, false, "copy_");
        touch(self, s, true, "copy_");
        if (from != to) {
            Lock lock;
            merge(clocks[to], clocks[from]);
        }
        views.cpu(self).copy_(views.cpu(src));
        return self;
    }
    const bool plain = LATE && non_blocking && self.dtype() == src.dtype() &&
                       self.sizes().equals(src.sizes()) && self.is_contiguous() && src.is_contiguous();
    if (on_gpu(self)) {
        if (!non_blocking) waits("copy to the device");
        views.cpu(self).copy_(src);
        uint64_t tick = touch(self, s, true, "copy to the device");
        if (!non_blocking)
            finish(s);
        else if (plain && is_pinned_at(src.data_ptr())) {
            Lock lock;
            copies.push_back({key(s), tick, src.clone(), (char *)src.data_ptr(), src.nbytes(), false});
        }
        return self;
    }
    uint64_t tick = touch(src, s, false, "copy from the device");
    const bool late = non_blocking && is_pinned_at(self.data_ptr());
    if (!late) {
        waits(non_blocking ? "copy into pageable memory" : "copy from the device", !non_blocking);
        finish(s);
    }
    if (!late || !plain) {
        self.copy_(views.cpu(src));
        return self;
    }
    Tensor value = views.cpu(src).clone();
    memset(self.data_ptr(), 0xff, self.nbytes()); // who reads too early gets NaN
    Lock lock;
    copies.push_back({key(s), tick, value, (char *)self.data_ptr(), self.nbytes(), true});
    return self;
}
void record_stream(Tensor &self, Stream s) { guard.recordDataPtrOnStream(self.storage().data_ptr(), s); }
std::tuple<Tensor, Tensor> native_dropout(const Tensor &x, double p, std::optional<bool> train) {
    if (!train.value_or(true) || !p) return {x.clone(), at::ones_like(x, x.options().dtype(kBool))};
    Tensor mask = at::empty_like(x, x.options().dtype(kBool)).bernoulli_(1 - p);
    return {p == 1 ? at::zeros_like(x) : x * mask * (1 / (1 - p)), mask};
}
TORCH_LIBRARY_IMPL(_, BACKEND, m) { m.fallback(Schema::makeFromBoxedFunction<&kernel<DispatchKey::CPU>>()); }
TORCH_LIBRARY_IMPL(_, SPARSE, m) {
    m.fallback(Schema::makeFromBoxedFunction<&kernel<DispatchKey::SparseCPU>>());
}
TORCH_LIBRARY_IMPL(aten, BACKEND, m) {
    m.impl("empty.memory_format", &empty);
    m.impl("empty_strided", &empty_strided);
    m.impl("resize_", &resize_);
    m.impl("copy_", &copy_);
    m.impl("set_", &set_nothing);
    m.impl("set_.source_Storage", &set_storage);
    m.impl("set_.source_Storage_storage_offset", &set_place);
    m.impl("set_.source_Tensor", &set_tensor);
    m.impl("_local_scalar_dense", &local_scalar_dense);
    m.impl("record_stream", &record_stream);
    m.impl("native_dropout", &native_dropout);
    for (auto &name : {"mse_loss", "smooth_l1_loss"})
        m.impl(name, Schema::makeFromBoxedFunction<&kernel<DispatchKey::CPU>>());
}
TORCH_LIBRARY_IMPL(aten, SPARSE, m) { // torch's general ones would come before the fallback
    m.impl("sparse_dim", [](const Tensor &t) { return parts(t)->sparse_dim(); });
    m.impl("dense_dim", [](const Tensor &t) { return parts(t)->dense_dim(); });
    m.impl("is_coalesced", [](const Tensor &t) { return parts(t)->coalesced(); });
    for (auto &name : {"indices", "_indices"})
        m.impl(name, [](const Tensor &t) { return parts(t)->indices().alias(); });
    for (auto &name : {"values", "_values"})
        m.impl(name, [](const Tensor &t) { return parts(t)->values().alias(); });
}
struct Quiet : c10::WarningHandler {
    void process(const c10::Warning &) override {}
};
// Namespace.
} // namespace
namespace c10d {
struct SimulatedTimer : Timer {
    SimulatedTimer(c10::Device) {}
    std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};
C10_REGISTER_TYPED_CLASS(TimerRegistry, KIND, SimulatedTimer); // for DDP's statistics
} // namespace c10d
namespace at {
#ifdef SIM_MPS
struct SimulatedHooks : MPSHooksInterface {
    bool hasMPS() const override { return true; }
    bool isOnMacOSorNewer(unsigned, unsigned) const override { return true; }
    void deviceSynchronize() const override { guard.synchronizeDevice(0); }
    void emptyCache() const override {}
    size_t getCurrentAllocatedMemory() const override { return held[0]; }
    size_t getRecommendedMaxMemory() const override { return CAPACITY; }
#elif defined(SIM_NPU)
struct SimulatedHooks : PrivateUse1HooksInterface {
    Device getDeviceFromPtr(void *data) const override { return Device(KIND, memory.at(data).device); }
    void resizePrivateUse1Bytes(const c10::Storage &storage, size_t bytes) const override {
        grow(storage.unsafeGetStorageImpl(), bytes);
    }
#else
struct SimulatedHooks : CUDAHooksInterface {
    SimulatedHooks(CUDAHooksArgs) {}
    bool hasCUDA() const override { return true; }
    std::string showConfig() const override { return "simulated"; }
    void deviceSynchronize(DeviceIndex d) const override { guard.synchronizeDevice(d); }
#endif
    void init() const override { check_usable(); }
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return count > 0; }
    bool hasPrimaryContext(DeviceIndex d) const override { return context[d]; }
    DeviceIndex deviceCount() const override { return count; }
    DeviceIndex getCurrentDevice() const override { return current; }
    void setCurrentDevice(DeviceIndex d) const override { guard.setDevice(Device(KIND, d)); }
    DeviceIndex exchangeDevice(DeviceIndex d) const override {
        return guard.exchangeDevice(Device(KIND, d)).index();
    }
    DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return exchangeDevice(d); }
    bool isPinnedPtr(const void *p) const override { return is_pinned_at(p); }
    Allocator *getPinnedMemoryAllocator() const override { return &pinned_memory; }
    const Generator &getDefaultGenerator(DeviceIndex d) const override { return default_numbers(d); }
    Generator getNewGenerator(DeviceIndex d) const override {
        return hands_out_defaults ? default_numbers(d) : make_generator<Numbers>(d < 0 ? current : d);
    }
};
#ifdef SIM_MPS
C10_REGISTER_CLASS(MPSHooksRegistry, MPSHooks, SimulatedHooks);
#elif defined(SIM_NPU)
[[maybe_unused]] const bool hooks_registered = (RegisterPrivateUse1HooksInterface(new SimulatedHooks), true);
#else
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, SimulatedHooks);
#endif
// In place of torch's.
namespace accelerator {
std::optional<c10::DeviceType> getAccelerator(bool) { return KIND; }
} // namespace accelerator
} // namespace at
#ifdef SIM_NPU
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
// Which functions autocast gives the shorter type is the backend's to say, and this one says what CUDA does.
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
    using namespace at::autocast;
#define SHORTER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define LONGER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
    AT_FORALL_LOWER_PRECISION_FP(SHORTER)
    AT_FORALL_FP32(LONGER)
#define LONGER_UNLESS_ASKED(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
    AT_FORALL_FP32_SET_OPT_DTYPE(LONGER_UNLESS_ASKED)
    AT_FORALL_PROMOTE(WIDEST)
}
#endif
extern "C" { // for simulation.py
void sim_install(void (*callback)(const char *, const char *), const char *names, int visible) {
    report = callback;
    count = visible;
    std::istringstream lines(names);
    for (string line; std::getline(lines, line);) loose.insert(line);
    c10::SetAllocator(KIND, &device_memory);
    at::setHostAllocator(KIND, &pinned_memory);
    pthread_atfork(nullptr, nullptr, [] { forked = touched; });
    // The next ones are overridden on purpose.
    Quiet quiet;
    c10::WarningUtils::WarningHandlerGuard silent(&quiet);
    static torch::Library exchanges(torch::Library::IMPL, "c10d", DispatchKey::BACKEND, __FILE__, __LINE__);
    for (auto &name : {"allreduce_", "allreduce_coalesced_", "broadcast_", "allgather_", "_allgather_base_",
                       "allgather_coalesced_", "allgather_into_tensor_coalesced_", "reduce_",
                       "reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_",
                       "gather_", "scatter_", "alltoall_", "alltoall_base_", "send", "recv_"})
        exchanges.impl(name, Schema::makeFromBoxedFunction<&kernel<DispatchKey::CPU>>());
}
int sim_count() { return count; }
int sim_get_device() { return current; }
void sim_set_device(int d) { guard.setDevice(Device(KIND, d)); }
int sim_forked() { return forked; }
int sim_has_context(int d) { return context[d]; }
void sim_note_context(int d) { context[d] = true; }
void sim_init() { check_usable(); }
void sim_defaults(int on) { hands_out_defaults = on; }
void sim_synchronize(int d) { guard.synchronizeDevice(d); }
int sim_get_debug_mode() { return debug_mode; }
void sim_set_debug_mode(int mode) { debug_mode = mode; }
void sim_resize(c10::StorageImpl *storage, size_t bytes) { grow(storage, bytes); }
int64_t sim_get_stream(int d) { return chosen[d]; }
void sim_set_stream(int d, int64_t s) {
    chosen[d] = s;
    current = d;
}
size_t sim_memory(int d, int what) { return what == 0 ? held[d] : what == 1 ? peak[d] : CAPACITY; }
void sim_reset_peak(int d) { peak[d] = held[d]; }
void sim_set_share(int d, double of_capacity) { share[d] = of_capacity; }
}
