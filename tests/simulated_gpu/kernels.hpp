// Kernels: the CPU's, on the same memory.
#pragma once
#include "streams.hpp"
#include <ATen/SparseTensorImpl.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/library.h>

namespace {
using Schema = torch::CppFunction;

SparseTensorImpl *parts(const Tensor &t) { return static_cast<SparseTensorImpl *>(t.unsafeGetTensorImpl()); }
c10::Storage storage_of(size_t n, c10::DataPtr data, c10::Allocator *by) {
    return c10::Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), n,
                                                              std::move(data), by, true));
}
Tensor laid_out(Tensor t, const Tensor &like) {
    t.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
    if (like.is_conj()) t._set_conj(true);
    return t;
}
struct Views { // of one call
    string op = "a kernel";
    std::unordered_map<c10::StorageImpl *, c10::Storage> storages;
    // A CPU tensor of a GPU tensor's memory, and that one.
    std::vector<std::pair<Tensor, Tensor>> pairs;
    Tensor cpu(const Tensor &t) {
        if (!t.defined() || !on_gpu(t)) return t;
        for (auto &[c, g] : pairs)
            if (g.is_same(t)) return c;
        if (t.is_sparse()) {
            auto none = std::nullopt;
            pairs.emplace_back(at::_sparse_coo_tensor_unsafe(cpu(parts(t)->indices()),
                                                             cpu(parts(t)->values()), t.sizes(), none, none,
                                                             none, none, parts(t)->coalesced()),
                               t);
        } else {
            auto &storage = storages[t.storage().unsafeGetStorageImpl()];
            if (!storage)
                storage = storage_of(t.storage().nbytes(),
                                     {t.storage().mutable_data(), new c10::Storage(t.storage()),
                                      [](void *kept) { delete (c10::Storage *)kept; }, Device(kCPU)},
                                     c10::GetAllocator(kCPU));
            pairs.emplace_back(
                laid_out(at::detail::make_tensor<c10::TensorImpl>(
                             c10::Storage(storage), DispatchKeySet(DispatchKey::CPU), t.dtype()),
                         t),
                t);
        }
        return pairs.back().first;
    }
    Tensor gpu(const Tensor &t, DeviceIndex d) {
        if (!t.defined() || !t.device().is_cpu()) return t;
        for (auto &[c, g] : pairs)
            if (c.is_same(t)) return g;
        if (t.is_sparse()) {
            Tensor s =
                at::detail::make_tensor<SparseTensorImpl>(DispatchKeySet(DispatchKey::SPARSE), t.dtype());
            parts(s)->resize_(t.sparse_dim(), t.dense_dim(), t.sizes());
            parts(s)->set_indices_and_values_unsafe(gpu(t._indices(), d), gpu(t._values(), d));
            parts(s)->set_coalesced(t.is_coalesced());
            return s;
        }
        for (auto &[c, g] : pairs)
            if (!c.is_sparse() && c.storage().unsafeGetStorageImpl() == t.storage().unsafeGetStorageImpl())
                return laid_out(at::detail::make_tensor<c10::TensorImpl>(
                                    c10::TensorImpl::VIEW, c10::Storage(g.storage()), g.key_set(), t.dtype()),
                                t);
        c10::DeviceGuard on(Device(KIND, d));
        size_t n = t.storage().nbytes();
        auto storage = storage_of(n, device_memory.allocate(n), &device_memory);
        if (n) {
            memcpy(storage.mutable_data(), t.storage().data(), n);
            Lock lock;
            Key s = key(now(d));
            use(lock, storage.mutable_data(), s, launch(s), true, op);
        }
        return laid_out(at::detail::make_tensor<c10::TensorImpl>(
                            std::move(storage), DispatchKeySet(DispatchKey::BACKEND), t.dtype()),
                        t);
    }
};
IValue mapped(const IValue &v, const std::function<Tensor(const Tensor &)> &f) {
    if (v.isTensor()) return f(v.toTensor());
    if (!v.isList()) return v;
    c10::impl::GenericList out(v.toList().elementType());
    for (const IValue &e : v.toList()) out.push_back(mapped(e, f));
    return out;
}
// Functions of TensorIterator's, which take 0-dimensional CPU tensors beside a GPU's.
std::set<string> loose;
const std::set<string> READS = {"nonzero",
                                "masked_select",
                                "unique_dim",
                                "_unique2",
                                "_unique",
                                "unique_consecutive",
                                "unique_dim_consecutive",
                                "bincount",
                                "equal",
                                "multinomial",
                                "_ctc_loss",
                                "_coalesce"};
#define SAME_DEVICE "Expected all tensors to be on the same device, but found at least two devices, "
void grow(c10::StorageImpl *storage, size_t bytes) {
    c10::DeviceGuard on(storage->device());
    auto data = device_memory.allocate(bytes);
    if (size_t n = std::min(bytes, storage->nbytes())) memcpy(data.get(), storage->data(), n);
    storage->set_data_ptr_noswap(std::move(data));
    storage->set_nbytes(bytes);
}
template <DispatchKey KEY> void kernel(const c10::OperatorHandle &handle, torch::jit::Stack *stack) {
    auto &schema = handle.schema();
    const bool exchanges = schema.name().rfind("c10d::", 0) == 0;
    const string op = schema.name().substr(schema.name().rfind(':') + 1);
    const size_t n = schema.arguments().size();
    std::vector<IValue> args(stack->end() - n, stack->end());
    std::vector<Tensor> in_main_memory;
    DeviceIndex device = -1;
    bool masks = false;
    for (size_t i = 0; i < n; ++i) {
        if (args[i].isDevice() && on_gpu(args[i].toDevice()) && device < 0)
            device = index_of(args[i].toDevice());
        bool indices = schema.arguments()[i].name() == "indices" && args[i].isList();
        mapped(args[i], [&](const Tensor &t) -> Tensor {
            if (!t.defined()) return t;
            masks |= indices && (t.scalar_type() == kBool || t.scalar_type() == kByte);
            if (on_gpu(t)) {
                if (device < 0) device = t.device().index();
                TORCH_CHECK(exchanges || t.device().index() == device || (t.dim() == 0 && loose.count(op)),
                            SAME_DEVICE, "cuda:", int(device), " and ", t.device(), "! (", op, ")");
            } else if (indices)
                waits(op + " by an index in main memory");
            else if (t.device().is_cpu())
                in_main_memory.push_back(t);
            return t;
        });
    }
    if (device < 0) device = current;
    for (auto &t : in_main_memory)
        TORCH_CHECK(exchanges || (t.dim() == 0 && loose.count(op)) || op == "_pack_padded_sequence",
                    SAME_DEVICE, "cuda:", int(device), " and cpu! (", op, ")");
    if (masks && op.find("index_put") != string::npos) masks = args[2].toTensor().numel() != 1;
    if (READS.count(op) || masks || (op == "repeat_interleave" && args.back().isNone())) {
        waits(op);
        finish(now(device));
    }
    c10::DeviceGuard on(Device(KIND, device));
    auto views = std::make_shared<Views>();
    views->op = op;
    std::map<void *, bool> touched_here;
    for (size_t i = 0; i < n; ++i) {
        auto &argument = schema.arguments()[i];
        const bool writes = exchanges || (argument.alias_info() && argument.alias_info()->isWrite());
        const IValue given = args[i];
        args[i] = mapped(given, [&](const Tensor &t) {
            if (t.defined() && on_gpu(t) && !t.is_sparse() && t.storage().nbytes())
                touched_here[t.storage().mutable_data()] |= writes;
            return views->cpu(t);
        });
        if (given.isDevice() && on_gpu(given.toDevice())) args[i] = Device(kCPU);
        // The same ranks, with the backend of GPU tensors (gloo, whatever its name) for CPU tensors.
        if (exchanges && argument.name() == "process_group") {
            auto group = given.toCustomClass<c10d::ProcessGroup>(),
                 shadow = c10::make_intrusive<c10d::ProcessGroup>(group->getRank(), group->getSize());
            shadow->setBackend(kCPU, c10d::ProcessGroup::BackendType::GLOO, group->getBackend(KIND));
            args[i] = IValue(shadow);
        }
        if (argument.type()->str() == "Generator?" || argument.type()->str() == "Generator") {
            TORCH_CHECK(given.isNone() || on_gpu(given.toGenerator().device()),
                        "Expected a 'cuda' device type for generator but found 'cpu'");
            Generator g = given.isNone() ? default_numbers(device) : given.toGenerator();
            std::lock_guard<std::mutex> locked(g.mutex());
            args[i] = static_cast<Numbers *>(g.unsafeGetGeneratorImpl())->next();
        }
    }
    {
        Lock lock;
        Key s = key(now(device));
        uint64_t tick = launch(s);
        for (auto &[data, writes] : touched_here) use(lock, data, s, tick, writes, op);
    }
    std::copy(args.begin(), args.end(), stack->end() - n);
    handle.redispatchBoxed(DispatchKeySet(KEY), stack);
    for (auto &[c, g] : views->pairs)
        // An out= tensor that the kernel has given another size.
        if (!c.is_sparse() && !c.sizes().equals(g.sizes())) {
            if (c.storage().data() != g.storage().data()) {
                grow(g.storage().unsafeGetStorageImpl(), c.storage().nbytes());
                memcpy(g.storage().mutable_data(), c.storage().data(), c.storage().nbytes());
            }
            g.unsafeGetTensorImpl()->set_sizes_and_strides(c.sizes(), c.strides());
        }
    for (auto one = stack->end() - schema.returns().size(); one != stack->end(); ++one)
        // Gloo's work, with the GPU tensors as its results.
        if (exchanges && one->isCustomClass()) try {
                auto done = one->toCustomClass<c10d::Work>()->getFuture();
                *one = IValue(c10d::Work::create_from_future(done->then(
                    [views, device](c10::ivalue::Future &f) -> IValue {
                        return mapped(f.value(), [&](const Tensor &t) { return views->gpu(t, device); });
                    },
                    done->elementType())));
                // Some have no such results.
            } catch (const c10::Error &) {}
        else
            *one = mapped(*one, [&](const Tensor &t) {
                return std::any_of(in_main_memory.begin(), in_main_memory.end(),
                                   [&](auto &own) { return own.is_same(t); })
                           ? t
                           : views->gpu(t, device);
            });
}
} // namespace
