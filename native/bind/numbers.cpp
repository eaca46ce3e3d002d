#include <stdexcept>

#include "bindings.h"
#include "forebay/crc32c.h"

namespace forebay::bind {
namespace {

DecayMode parse_decay_mode(const std::string& name) {
    if (name == "decoupled") {
        return DecayMode::decoupled;
    }
    if (name == "l2") {
        return DecayMode::l2;
    }
    if (name == "none") {
        return DecayMode::none;
    }
    throw std::invalid_argument("unknown decay mode '" + name +
                                "'\nhint: one of decoupled, l2, none");
}

std::string decay_mode_name(DecayMode mode) {
    switch (mode) {
        case DecayMode::decoupled:
            return "decoupled";
        case DecayMode::l2:
            return "l2";
        case DecayMode::none:
            break;
    }
    return "none";
}

void check_items(const char* role, Address address, std::size_t item, std::size_t elements) {
    if (elements > 0 && (address == 0 || address % item != 0)) {
        throw std::invalid_argument(
            "address of " + std::string(role) + " is " + std::to_string(address) +
            ", which must be non-zero and a multiple of " + std::to_string(item) + " bytes");
    }
}

void convert_items(Address destination, const std::string& destination_dtype, Address source,
                   const std::string& source_dtype, std::size_t elements) {
    const DType to = parse_dtype(destination_dtype);
    const DType from = parse_dtype(source_dtype);
    check_items("destination", destination, item_bytes(to), elements);
    check_items("source", source, item_bytes(from), elements);
    const KernelTable& table = chosen_kernels();
    const WithoutGil released;
    convert(table, to, reinterpret_cast<void*>(destination), from,
            reinterpret_cast<const void*>(source), elements);
}

void split_items(Address whole, Address high, Address low, std::size_t elements) {
    check_items("whole", whole, 4, elements);
    check_items("high", high, 2, elements);
    check_items("low", low, 2, elements);
    const KernelTable& table = chosen_kernels();
    const WithoutGil released;
    table.split(reinterpret_cast<const float*>(whole), reinterpret_cast<std::uint16_t*>(high),
                reinterpret_cast<std::uint16_t*>(low), elements);
}

void join_items(Address whole, Address high, Address low, std::size_t elements) {
    check_items("whole", whole, 4, elements);
    check_items("high", high, 2, elements);
    check_items("low", low, 2, elements);
    const KernelTable& table = chosen_kernels();
    const WithoutGil released;
    table.join(reinterpret_cast<const std::uint16_t*>(high),
               reinterpret_cast<const std::uint16_t*>(low), reinterpret_cast<float*>(whole),
               elements);
}

std::uint32_t checksum(Address address, std::size_t nbytes, std::uint32_t seed) {
    check_items("bytes", address, 1, nbytes);
    const KernelTable& table = chosen_kernels();
    const WithoutGil released;
    return crc32c(table.level, reinterpret_cast<const void*>(address), nbytes, seed);
}

}  // namespace

void bind_numbers(nb::module_& module) {
    using namespace nb::literals;
    module.def("kernel_level", [] { return std::string(chosen_kernels().level); });
    module.def("convert", &convert_items, "dst"_a, "dst_dtype"_a, "src"_a, "src_dtype"_a,
               "elements"_a);
    module.def("split", &split_items, "bits"_a, "hi"_a, "low"_a, "elements"_a);
    module.def("join", &join_items, "bits"_a, "hi"_a, "low"_a, "elements"_a);
    module.def("crc32c", &checksum, "address"_a, "nbytes"_a, "seed"_a = 0);
    nb::class_<Hyper>(module, "Hyper")
        .def(
            "__init__",
            [](Hyper* self, const std::string& decay_mode, double decay, double one_minus_beta1,
               double beta2, double one_minus_beta2, double eps, double bias_correction2_sqrt,
               double step_size) {
                new (self) Hyper{
                    parse_decay_mode(decay_mode),
                    static_cast<float>(decay),
                    static_cast<float>(one_minus_beta1),
                    static_cast<float>(beta2),
                    static_cast<float>(one_minus_beta2),
                    static_cast<float>(eps),
                    static_cast<float>(bias_correction2_sqrt),
                    static_cast<float>(step_size),
                };
            },
            "decay_mode"_a, "decay"_a, "one_minus_beta1"_a, "beta2"_a, "one_minus_beta2"_a, "eps"_a,
            "bias_correction2_sqrt"_a, "step_size"_a)
        .def_prop_ro("decay_mode",
                     [](const Hyper& self) { return decay_mode_name(self.decay_mode); })
        .def_ro("decay", &Hyper::decay)
        .def_ro("one_minus_beta1", &Hyper::one_minus_beta1)
        .def_ro("beta2", &Hyper::beta2)
        .def_ro("one_minus_beta2", &Hyper::one_minus_beta2)
        .def_ro("eps", &Hyper::eps)
        .def_ro("bias_correction2_sqrt", &Hyper::bias_correction2_sqrt)
        .def_ro("step_size", &Hyper::step_size);
}

}  // namespace forebay::bind
