// What all parts of the simulation share: the kind of device that is built, and its state.
#pragma once
#include <ATen/ATen.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <chrono>
#include <list>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#if defined(SIM_MPS) // Apple's GPU: one device, without float64
#define BACKEND MPS
#define SPARSE SparseMPS
#elif defined(SIM_NPU) // An accelerator that torch knows by registration alone
#define BACKEND PrivateUse1
#define SPARSE SparsePrivateUse1
#else
#define BACKEND CUDA
#define SPARSE SparseCUDA
#endif
constexpr auto KIND = c10::DeviceType::BACKEND;

namespace {
using namespace at;
using c10::DeviceIndex, c10::DispatchKeySet, c10::IValue, c10::Stream, c10::StreamId, std::string;

constexpr int MOST = 16;
size_t number(const char *name, size_t otherwise) {
    const char *text = getenv(name);
    return text && *text ? strtoull(text, nullptr, 10) : otherwise;
}
const size_t CAPACITY = number("SIM_MEMORY", size_t(2) << 30);
const bool LATE = number("SIM_LATE_COPIES", 1);
int count = KIND == DeviceType::MPS ? 1 : std::min<int>(number("SIM_GPUS", 4), MOST), debug_mode = 0;
thread_local DeviceIndex current = 0;
// Each device's current stream.
thread_local StreamId chosen[MOST] = {};
bool context[MOST] = {}, touched = false, forked = false, hands_out_defaults = false;
void (*report)(const char *kind, const char *what) = nullptr;
bool on_gpu(const Tensor &t) { return t.device().type() == KIND; }
bool on_gpu(const Device &d) { return d.type() == KIND; }
DeviceIndex index_of(const Device &d) { return d.index() < 0 ? current : d.index(); }
} // namespace
