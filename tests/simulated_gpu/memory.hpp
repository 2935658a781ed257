// Memory of the devices, pinned memory, and random numbers.
#pragma once
#include "order.hpp"
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>

namespace {
void release(void *p) {
    Lock lock;
    if (auto found = memory.find(p); found != memory.end()) {
        Memory &m = found->second;
        Clock unknown;
        for (auto &[other, t] : m.used)
            if (other != m.stream && !m.noted.count(other) && clocks[m.stream][other] < t && host[other] < t)
                unknown[other] = t;
        if (!unknown.empty()) {
            auto &list = freed[m.stream];
            list.push_back({m.bytes, unknown});
            if (list.size() > 1000) list.pop_front();
        }
        held[m.device] -= m.bytes;
        memory.erase(found);
    }
    free(p);
}
// NaN, until something is written.
void *block(size_t n) {
    void *p = aligned_alloc(64, (n + 64) / 64 * 64);
    memset(p, 0xff, n);
    return p;
}
struct DeviceMemory final : c10::Allocator {
    c10::DataPtr allocate(size_t n) override {
        check_usable();
        context[current] = true;
        const size_t most = share[current] ? size_t(share[current] * CAPACITY) : CAPACITY;
        TORCH_CHECK_WITH(OutOfMemoryError, held[current] + n <= most,
                         "CUDA out of memory. Tried to allocate ", n / 1048576.0, " MiB. GPU ", int(current),
                         " has a total capacity of ", CAPACITY / 1048576.0, " MiB of which ",
                         (most - held[current]) / 1048576.0, " MiB is free.");
        if (!n) return {nullptr, nullptr, &release, Device(KIND, current)};
        void *p = block(n);
        Lock lock;
        Key s = key(now(current));
        Memory &m = memory[p] = {n, current, s, {s, launch(s)}, "empty", {}, {}, {}};
        auto &list = freed[s]; // torch may give out any of these that is large enough
        if (auto f = std::find_if(list.begin(), list.end(), [&](auto &one) { return one.bytes >= n; });
            f != list.end()) {
            merge(m.before, f->used);
            list.erase(f);
        }
        peak[current] = std::max(peak[current], held[current] += n);
        return {p, p, &release, Device(KIND, current)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &release; }
    void copy_data(void *to, const void *from, size_t n) const override { memcpy(to, from, n); }
} device_memory;
void unpin(void *p) {
    {
        Lock lock;
        char *start = (char *)p, *end = start + pinned[start];
        // Torch keeps the block until then.
        copies.remove_if([&](Copy &c) {
            bool ours = c.at >= start && c.at < end;
            if (ours) check_sent(lock, c);
            return ours;
        });
        pinned.erase(start);
    }
    free(p);
}
struct PinnedMemory final : HostAllocator {
    c10::DataPtr allocate(size_t n) override {
        check_usable();
        void *p = block(n);
        Lock lock;
        pinned[(char *)p] = std::max<size_t>(n, 1);
        return {p, p, &unpin, Device(kCPU)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
    void copy_data(void *to, const void *from, size_t n) const override { memcpy(to, from, n); }
    bool record_event(void *, void *, Stream) override { return true; }
    void empty_cache() override {}
    void reset_accumulated_stats() override {}
    void reset_peak_stats() override {}
    HostStats get_stats() override { return {}; }
} pinned_memory;
bool is_pinned_at(const void *p) {
    Lock lock;
    auto after = pinned.upper_bound((char *)p);
    return after != pinned.begin() && (--after, p < after->first + after->second);
}

// A seed and an offset, as Philox has.
struct Numbers final : c10::GeneratorImpl {
    uint64_t state[2] = {default_rng_seed_val, 0};
    Numbers(DeviceIndex d) : GeneratorImpl(Device(KIND, d), DispatchKeySet(DispatchKey::BACKEND)) {}
    void set_current_seed(uint64_t s) override {
        state[0] = s;
        state[1] = 0;
    }
    void set_offset(uint64_t o) override { state[1] = o; }
    uint64_t get_offset() const override { return state[1]; }
    uint64_t current_seed() const override { return state[0]; }
    uint64_t seed() override {
        set_current_seed(c10::detail::getNonDeterministicRandom());
        return state[0];
    }
    void set_state(const c10::TensorImpl &t) override {
        TORCH_CHECK(t.numel() == 16 && t.device().is_cpu(), "RNG state is wrong size");
        memcpy(state, t.data(), 16);
    }
    c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
        Tensor t = at::empty({16}, TensorOptions(kCPU).dtype(kByte));
        memcpy(t.data_ptr(), state, 16);
        return t.getIntrusivePtr();
    }
    GeneratorImpl *clone_impl() const override {
        auto *c = new Numbers(device_.index());
        memcpy(c->state, state, 16);
        return c;
    }
    Generator next() {
        state[1] += 4;
        return at::detail::createCPUGenerator((state[0] ^ 0x9e3779b97f4a7c15ull) +
                                              state[1] * 0xbf58476d1ce4e5b9ull);
    }
};
Generator &default_numbers(DeviceIndex d) {
    static std::vector<Generator> all = [] {
        std::vector<Generator> v;
        for (int i = 0; i < MOST; ++i) v.push_back(make_generator<Numbers>(i));
        return v;
    }();
    return all[d < 0 ? current : d];
}
} // namespace
