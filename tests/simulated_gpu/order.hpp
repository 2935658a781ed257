// What is known to be done: a vector clock for each stream and one for the host. Who uses memory that it
// doesn't know to be ready is in a race, whether or not the race would have shown this time.
#pragma once
#include "kind.hpp"

namespace {
using Key = int64_t; // a stream's
using Clock = std::map<Key, uint64_t>;
struct Memory {
    size_t bytes;
    DeviceIndex device;
    Key stream;
    std::pair<Key, uint64_t> written;
    string writer;
    Clock used, before;
    std::set<Key> noted;
};
// From pinned memory, or into it if it arrives.
struct Copy {
    Key stream;
    uint64_t tick;
    Tensor value;
    char *at;
    size_t bytes;
    bool arrives;
};
struct Freed {
    size_t bytes;
    Clock used;
};
std::recursive_mutex mutex;
std::unordered_map<void *, Memory> memory;
std::map<char *, size_t> pinned;
std::list<Copy> copies;
std::unordered_map<Key, Clock> clocks;
// Memory that another stream may still use, and that this one gets again.
std::unordered_map<Key, std::list<Freed>> freed;
Clock host;
size_t held[MOST] = {}, peak[MOST] = {}, streams_made = 0;
// Of the capacity, what the process may have.
double share[MOST] = {};
Key key(Stream s) { return Key(s.device_index()) * 65536 + s.id(); }
Stream now(DeviceIndex d) { return Stream(Stream::UNSAFE, Device(KIND, d), chosen[d]); }
void merge(Clock &into, const Clock &from) {
    for (auto &[k, t] : from) into[k] = std::max(into[k], t);
}
uint64_t launch(Key s) {
    merge(clocks[s], host);
    return ++clocks[s][s];
}
struct Lock { // reports once it is open: Python has a lock of its own
    std::vector<string> races;
    std::unique_lock<std::recursive_mutex> lock{mutex};
    ~Lock() {
        lock.unlock();
        if (report)
            for (auto &race : races) report("race", race.c_str());
    }
};
bool known(const Clock &clock) { // to the host
    Lock lock;
    for (auto &[k, t] : clock)
        if (host[k] < t) return false;
    return true;
}
void waits(const string &what, bool seen = true) { // seen: by torch.cuda.set_sync_debug_mode
    TORCH_CHECK(!(seen && debug_mode == 2), "called a synchronizing CUDA operation (", what, ")");
    if (report) report(seen ? "wait" : "wait unseen", what.c_str());
}
void check_usable() {
    TORCH_CHECK(!forked, "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, "
                         "you must use the 'spawn' start method");
    touched = true;
}
void check_sent(Lock &lock, const Copy &c) {
    if (!c.arrives && memcmp(c.at, c.value.data_ptr(), c.bytes))
        lock.races.push_back("pinned memory was changed before its copy to the device was known to be done");
}
void host_knows(const Clock &clock) { // so do the copies up to there
    Lock lock;
    merge(host, clock);
    for (auto c = copies.begin(); c != copies.end();) {
        if (host[c->stream] < c->tick) {
            ++c;
            continue;
        }
        if (c->arrives) memcpy(c->at, c->value.data_ptr(), c->bytes);
        check_sent(lock, *c);
        c = copies.erase(c);
    }
}
void finish(Stream s) {
    Lock lock;
    host_knows(Clock(clocks[key(s)]));
}
void use(Lock &lock, void *data, Key s, uint64_t tick, bool writes, const string &op) {
    auto found = memory.find(data);
    if (found == memory.end()) return;
    Memory &m = found->second;
    Clock &known = clocks[s];
    if (m.written.first != s && known[m.written.first] < m.written.second) {
        lock.races.push_back(op + " uses memory before the stream that writes it (" + m.writer +
                             ") is waited for");
        known[m.written.first] = m.written.second;
    }
    auto unknown = [&](const Clock &clock) {
        return std::any_of(clock.begin(), clock.end(),
                           [&](auto &one) { return one.first != s && known[one.first] < one.second; });
    };
    if (writes) {
        if (unknown(m.before))
            lock.races.push_back(
                op +
                " writes into memory that was freed while another stream may use it, without record_stream");
        if (unknown(m.used))
            lock.races.push_back(op + " overwrites memory that another stream may still use");
        m.before.clear();
        m.used.clear();
        m.written = {s, tick};
        m.writer = op;
    }
    m.used[s] = tick;
}
} // namespace
