// Devices, streams and events, as torch asks for them.
#pragma once
#include "memory.hpp"

namespace {
struct Event {
    Clock clock;
    bool recorded = false, asked = false;
    std::chrono::steady_clock::time_point time;
};
struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return KIND; }
    DeviceIndex deviceCount() const noexcept override { return count; }
    Device getDevice() const override { return Device(KIND, current); }
    void setDevice(Device d) const override {
        TORCH_CHECK(d.index() < count, "CUDA error: invalid device ordinal");
        uncheckedSetDevice(d);
    }
    void uncheckedSetDevice(Device d) const noexcept override { current = index_of(d); }
    Device exchangeDevice(Device d) const override {
        Device old(KIND, current);
        setDevice(d);
        return old;
    }
    Stream getStream(Device d) const override { return now(index_of(d)); }
    Stream getDefaultStream(Device d) const override {
        return Stream(Stream::DEFAULT, Device(KIND, index_of(d)));
    }
    Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
    Stream getNewStream(Device d, int) const override {
        check_usable();
        context[index_of(d)] = true;
        return Stream(Stream::UNSAFE, Device(KIND, index_of(d)), StreamId(1 + streams_made++ % 32));
    }
    Stream exchangeStream(Stream s) const override {
        Stream old = now(s.device_index());
        chosen[s.device_index()] = s.id();
        return old;
    }
    void *getStreamNativeHandle(const Stream s) const override { return (void *)s.id(); }
    bool queryStream(const Stream &s) const override {
        finish(s);
        return true;
    }
    void synchronizeStream(const Stream &s) const override {
        waits("Stream.synchronize");
        finish(s);
    }
    void synchronizeDevice(const DeviceIndex d) const override {
        waits("synchronize", false);
        Lock lock;
        for (auto &[k, clock] : clocks)
            if (k / 65536 == d) host_knows(Clock(clock));
    }
    void record(void **e, const Stream &s, const DeviceIndex, const c10::EventFlag) const override {
        if (!*e) *e = new Event;
        Lock lock;
        launch(key(s));
        *(Event *)*e = {clocks[key(s)], true, false, std::chrono::steady_clock::now()};
    }
    void block(void *e, const Stream &s) const override {
        Lock lock;
        if (e) merge(clocks[key(s)], ((Event *)e)->clock);
    }
    bool queryEvent(void *e) const override { // not done yet when it is asked for the first time
        if (!e || !((Event *)e)->recorded || known(((Event *)e)->clock)) return true;
        if (!std::exchange(((Event *)e)->asked, true) && LATE) return false;
        host_knows(((Event *)e)->clock);
        return true;
    }
    void synchronizeEvent(void *e) const override {
        waits("Event.synchronize", false);
        if (e) host_knows(((Event *)e)->clock);
    }
    double elapsedTime(void *from, void *to, const DeviceIndex) const override { // in milliseconds
        return std::chrono::duration<double, std::milli>(((Event *)to)->time - ((Event *)from)->time).count();
    }
    void destroyEvent(void *e, const DeviceIndex) const noexcept override { delete (Event *)e; }
    void recordDataPtrOnStream(const c10::DataPtr &p, const Stream &s) const override {
        Lock lock;
        if (auto m = memory.find(p.get()); m != memory.end()) m->second.noted.insert(key(s));
    }
};
const Guard guard;
c10::impl::DeviceGuardImplRegistrar guard_registrar(KIND, &guard);
} // namespace
