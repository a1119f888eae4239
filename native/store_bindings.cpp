// The store for Python: built from extents that Python knows, read by native threads or by Python's own. Whatever may wait
// lets other Python threads run.
#include "store_bindings.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "gil.h"
#include "py_errors.h"
#include "store/replay.h"
#include "store/store.h"

namespace nb = nanobind;

namespace moeflux {

namespace {

using Ids = nb::ndarray<const int64_t, nb::c_contig, nb::device::cpu>;
using Place = std::pair<int, int64_t>;  // component, offset in it

int64_t swept_of(const Ids& ids, int64_t n_swept) {
    require(n_swept >= 0 && n_swept <= int64_t(ids.size()), "n_swept");
    return n_swept;
}

Dtype dtype_of(const std::string& name) {
    if (name == "F32") return Dtype::f32;
    if (name == "BF16") return Dtype::bf16;
    if (name == "F16") return Dtype::f16;
    throw Error(Error::Kind::format, "no kernels for experts of type " + name, {}, "F32, BF16 or F16");
}

Codec codec_of(const std::string& name) {
    if (name == "plain") return Codec::plain;
    if (name == "affine") return Codec::affine;
    if (name == "fp8") return Codec::fp8;
    throw Error(Error::Kind::format, "no kernels for experts of codec " + name, {}, "plain, affine or fp8");
}

void add_component(ExpertLayer& layer, const std::string& projection, const std::string& part, const std::string& dtype,
                   int64_t bytes, Ids files, Ids offsets, bool kept) {
    require(int64_t(files.size()) == layer.n_experts && files.size() == offsets.size(), "one extent per expert");
    Component component{projection, part, scalar_of(dtype), bytes, {}, kept};
    for (size_t i = 0; i < files.size(); ++i) {
        const int64_t file = files.data()[i];
        component.extents.push_back({file == int(file) ? int(file) : -1, offsets.data()[i], bytes});
    }
    layer.components.push_back(std::move(component));
}

void set_matrix(ExpertLayer& layer, const std::string& name, int64_t rows, int64_t cols, const std::string& codec,
                const std::string& dtype, int bits, int group, int block, Place weight, Place scales, Place biases) {
    ExpertMatrix m;
    m.shape.codec = codec_of(codec);
    m.shape.rows = rows;
    m.shape.cols = cols;
    m.shape.dtype = dtype_of(dtype);
    m.shape.bits = bits;
    m.shape.group = group;
    m.shape.block = block;
    m.weight = {weight.first, weight.second};
    m.scales = {scales.first, scales.second};
    m.biases = {biases.first, biases.second};
    require(name == "gate" || name == "up" || name == "down", "gate, up or down");
    (name == "gate" ? layer.gate : name == "up" ? layer.up : layer.down) = m;
}

// A job in the hands of Python. One that is dropped unfinished fails, so that nobody waits for it forever.
struct PyJob {
    std::shared_ptr<Store> store;
    Job job;
    bool finished = false;

    void finish(int64_t done, int error, int retries, const std::string& message) {
        if (finished) throw Error(Error::Kind::state, "the job was finished before");
        finished = true;
        ReadResult result;
        result.done = done;
        result.error = error;
        result.retries = retries;
        const Unlocked unlocked;
        store->finish(job, result, message);
    }
    PyJob(std::shared_ptr<Store> store, Job job) : store(std::move(store)), job(std::move(job)) {}
    ~PyJob() {
        if (!finished && store->here()) finish(0, 0, 0, "the reader gave up");
    }
};

// A lease and the memory of its views, which may outlive it.
struct PyLease {
    std::shared_ptr<Store> store;
    Lease lease;
    std::shared_ptr<const Arena> memory;
    int layer;
    std::vector<Expert> out;

    std::vector<int64_t> next(bool wait, const CancelFlag* cancel) {
        {
            Listener listener(cancel, signals());
            const Unlocked unlocked;
            lease.next(out, wait, &listener);
        }
        std::vector<int64_t> ids;
        for (const Expert& expert : out) ids.push_back(expert.id);
        return ids;
    }
    void release_some(const std::vector<int64_t>& ids) {
        std::vector<Expert> experts;
        for (const int64_t id : ids) experts.push_back({id, nullptr, nullptr, nullptr});
        const Unlocked unlocked;
        lease.release(experts);
    }
    nb::list views(int64_t expert, nb::handle owner) const {
        nb::list result;
        const auto& components = store->layer(layer).components;
        for (size_t c = 0; c < components.size(); ++c) {
            const size_t n = size_t(components[c].bytes);
            result.append(nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>>(lease.bytes(expert, int(c)), {n}, owner));
        }
        return result;
    }
};

nb::dict stats_dict(const StoreStats& s) {
    static constexpr std::pair<const char*, int64_t StoreStats::*> fields[] = {
        {"acquires", &StoreStats::acquires}, {"asked", &StoreStats::asked}, {"hits", &StoreStats::hits},
        {"late", &StoreStats::late}, {"joined", &StoreStats::joined}, {"misses", &StoreStats::misses},
        {"hints_issued", &StoreStats::hints_issued}, {"hints_dropped", &StoreStats::hints_dropped},
        {"hints_cancelled", &StoreStats::hints_cancelled}, {"hints_completed", &StoreStats::hints_completed},
        {"hints_failed", &StoreStats::hints_failed}, {"hints_useful", &StoreStats::hints_useful},
        {"hints_wasted", &StoreStats::hints_wasted}, {"hints_unused", &StoreStats::hints_unused},
        {"bytes_demand", &StoreStats::bytes_demand}, {"bytes_hint", &StoreStats::bytes_hint},
        {"evictions", &StoreStats::evictions}, {"retries", &StoreStats::retries}, {"errors", &StoreStats::errors},
        {"reads", &StoreStats::reads}, {"stall_ns", &StoreStats::stall_ns}, {"read_busy_ns", &StoreStats::read_busy_ns},
        {"read_ns", &StoreStats::read_ns}, {"slots", &StoreStats::slots}, {"slots_used", &StoreStats::slots_used},
        {"bytes_resident", &StoreStats::bytes_resident}};
    nb::dict result;
    for (const auto& [name, field] : fields) result[name] = s.*field;
    return result;
}

void bind_jobs(nb::module_& m) {
    nb::class_<PyJob>(m, "ReadJob", "One component of one expert, to be read by Python into `buffer`.")
        .def_prop_ro("layer", [](const PyJob& j) { return j.job.layer; })
        .def_prop_ro("expert", [](const PyJob& j) { return j.job.expert; })
        .def_prop_ro("component", [](const PyJob& j) { return j.job.component; })
        .def_prop_ro("file", [](const PyJob& j) { return j.job.extent.file; })
        .def_prop_ro("offset", [](const PyJob& j) { return j.job.extent.offset; })
        .def_prop_ro("length", [](const PyJob& j) { return j.job.extent.length; })
        .def_prop_ro("hint", [](const PyJob& j) { return j.job.hint; })
        .def_prop_ro("buffer", [](nb::handle self) {
            const Job& job = nb::cast<PyJob&>(self).job;
            return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(job.to, {size_t(job.extent.length)}, self);
        })
        .def("finish", &PyJob::finish, nb::arg("done"), nb::arg("error") = 0, nb::arg("retries") = 0, nb::arg("message") = "");
}

void bind_leases(nb::module_& m) {
    nb::class_<PyLease>(m, "StoreLease", "Permission to read slots.")
        .def("next", &PyLease::next, nb::arg("wait") = true, nb::arg("cancel").none() = nb::none())
        .def_prop_ro("left", [](const PyLease& l) { return l.lease.left(); })
        .def("views", [](nb::handle self, int64_t expert) { return nb::cast<PyLease&>(self).views(expert, self); })
        .def("release_some", &PyLease::release_some)
        .def("release", [](PyLease& l) {
            const Unlocked unlocked;
            l.lease.release();
        });
}

void bind_replay(nb::module_& m) {
    nb::class_<Replay>(m, "Replay", "The store's bookkeeping without bytes.")
        .def("__init__", [](Replay* self, int n_layers, int n_experts, int n_slots, int floor, const std::string& policy) {
            new (self) Replay(n_layers, n_experts, n_slots, floor, policy);
        })
        .def("access", [](Replay& r, int layer, Ids ids, int64_t n_swept) {
            return r.access(layer, ids.data(), int64_t(ids.size()), swept_of(ids, n_swept));
        })
        .def("hint", [](Replay& r, int layer, Ids ids) { return r.hint(layer, ids.data(), int64_t(ids.size())); })
        .def("next_token", &Replay::next_token)
        .def("holds", [](const Replay& r, int layer, int expert) { return r.residency().find(layer, expert) >= 0; })
        .def_prop_ro("crowded", [](const Replay& r) { return r.residency().crowded(); })
        .def("count", [](const Replay& r, int layer) { return r.residency().count(layer); })
        .def_ro("useful", &Replay::useful)
        .def_ro("wasted", &Replay::wasted)
        .def_ro("evictions", &Replay::evictions);
}

std::shared_ptr<Store> open_store(std::vector<std::string> paths, nb::list layers, int n_slots, int floor, std::string policy,
                                  bool direct, int n_readers, int sweep_slots, int64_t under_way) {
    StoreOptions options{std::move(paths), {}, n_slots, floor, std::move(policy), direct, n_readers, sweep_slots, under_way};
    for (nb::handle layer : layers)
        options.layers.push_back(layer.is_none() ? ExpertLayer{} : nb::cast<const ExpertLayer&>(layer));
    const Unlocked unlocked;
    return Store::open(std::move(options));
}

}  // namespace

void bind_store(nb::module_& m) {
    bind_jobs(m);
    bind_leases(m);
    bind_replay(m);
    nb::class_<ExpertLayer>(m, "ExpertLayer", "The experts of one layer: components at extents, and three matrices.")
        .def("__init__", [](ExpertLayer* self, int64_t n_experts) { new (self) ExpertLayer{n_experts, {}, {}, {}, {}}; })
        .def("component", &add_component, nb::arg("projection"), nb::arg("part"), nb::arg("dtype"), nb::arg("n_bytes"),
             nb::arg("files"), nb::arg("offsets"), nb::arg("kept") = false)
        .def("matrix", &set_matrix, nb::arg("name"), nb::arg("rows"), nb::arg("cols"), nb::arg("codec"), nb::arg("dtype"),
             nb::arg("bits"), nb::arg("group"), nb::arg("block"), nb::arg("weight"), nb::arg("scales"), nb::arg("biases"));
    nb::class_<Store>(m, "Store", "Routed experts behind a fixed number of slots.")
        .def("acquire",
             [](std::shared_ptr<Store> self, int layer, Ids ids, int64_t n_swept) {
                 Lease lease;
                 {
                     const Unlocked unlocked;
                     lease = self->acquire(layer, ids.data(), int64_t(ids.size()), swept_of(ids, n_swept));
                 }
                 auto memory = lease.memory();
                 return std::make_unique<PyLease>(PyLease{self, std::move(lease), std::move(memory), layer, {}});
             },
             nb::arg("layer"), nb::arg("ids"), nb::arg("n_swept") = 0)
        .def("hint",
             [](Store& self, int layer, Ids ids, bool sweep, bool soon) {
                 const Unlocked unlocked;
                 self.hint(layer, ids.data(), int64_t(ids.size()), sweep, soon);
             },
             nb::arg("layer"), nb::arg("ids"), nb::arg("sweep") = false, nb::arg("soon") = false)
        .def("next_token", &Store::next_token, nb::call_guard<Unlocked>())
        .def("close", &Store::close, nb::call_guard<Unlocked>())
        .def("stats", [](const Store& self) { return stats_dict(self.stats()); })
        .def("take_notes", &Store::take_notes)
        .def("resident", [](const Store& self) {
            const auto found = self.resident();
            return nb::bytes(found.data(), found.size());
        })
        .def_prop_ro("closed", &Store::closed)
        .def_prop_ro("here", &Store::here, "Whether this process opened it.")
        .def_prop_ro("slot_bytes", [](const Store& self) { return self.slot_bytes(); })
        .def("slots",
             [](const Store& self) {
                 nb::list result;
                 for (const auto& s : self.slots()) result.append(nb::make_tuple(s.layer, s.expert, s.pins, s.state));
                 return result;
             })
        .def("take_job", [](std::shared_ptr<Store> self, double timeout_s) -> nb::object {
            std::optional<Job> job;
            {
                const Unlocked unlocked;
                job = self->take(std::chrono::nanoseconds(int64_t(timeout_s * 1e9)));
            }
            if (!job) return nb::none();
            return nb::cast(std::make_unique<PyJob>(self, std::move(*job)));
        });
    m.def("open_store", &open_store, nb::arg("paths"), nb::arg("layers"), nb::arg("n_slots"), nb::arg("floor"),
          nb::arg("policy"), nb::arg("direct"), nb::arg("n_readers"), nb::arg("sweep_slots"), nb::arg("under_way") = 0);
    m.def("slot_bytes", [](const std::vector<int64_t>& sizes, bool direct) { return Store::slot_bytes(sizes, direct); },
          nb::arg("sizes"), nb::arg("direct"));
}

}  // namespace moeflux
