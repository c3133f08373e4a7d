// Bundles: files with the entries and the machine code that a package needs where there is no
// Python. exporter/bundle_file.py writes them, and says what is in them.
#pragma once

#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <string_view>

#include "entry.h"

namespace fastconv::host {

static_assert(std::endian::native == std::endian::little, "the numbers of bundles");

constexpr std::string_view kMagic = "fastconv bundle\n";
constexpr int64_t kFormat = 3;  // changes with the layout of bundles and with that of keys
constexpr int64_t kMostUnsigned = int64_t(1) << 32;

// What plans depend on: a GPU's compute capability and its number of SMs.
struct Gpu {
  int64_t major, minor, sm_count;
  bool operator==(const Gpu&) const = default;

  std::string words() const { return c10::str("sm_", major, minor, " with ", sm_count, " SMs"); }
};

// The parameters of cuTensorMapEncodeTiled or cuTensorMapEncodeIm2col.
struct MapParameters {
  bool is_im2col;
  int type, swizzle, promotion;
  std::vector<uint64_t> sizes{}, strides{};
  std::vector<uint32_t> element_strides{};
  std::vector<uint32_t> box{};  // in im2col mode the channels and the pixels
  std::vector<int> lower{}, upper{};
};

struct BundledArgument {
  int64_t kind, value;  // as in Argument
  MapParameters map{};
};

struct BundledLaunch {
  size_t kernel;
  std::array<unsigned, 3> grid{};
  unsigned block = 0, shared_bytes = 0;
  bool early = false;
  std::vector<BundledArgument> arguments{};
};

struct BundledKernel {
  size_t cubin;
  std::string name;
  int64_t shared_bytes;  // the most dynamic shared memory of its launches
};

struct BundledEntry {
  Gpu gpu;
  Entry entry{};           // without its launches
  bool is_filled = false;  // PyTorch's elementwise operators compute it: it has no products to add
  std::vector<BundledLaunch> launches{};
};

struct Bundle {
  std::string path, contents;
  std::vector<std::string_view> cubins{};
  std::vector<BundledKernel> kernels{};
  std::unordered_multimap<Key, BundledEntry, Hash> entries{};
};

inline uint32_t crc32(std::string_view bytes) {
  static const auto steps = [] {
    std::array<uint32_t, 256> made;
    for (uint32_t byte = 0; byte < 256; ++byte) {
      made[byte] = byte;
      for (int bit = 0; bit < 8; ++bit) {
        made[byte] = made[byte] >> 1 ^ (made[byte] & 1 ? 0xEDB88320u : 0);
      }
    }
    return made;
  }();
  uint32_t sum = ~0u;
  for (const char byte : bytes) sum = sum >> 8 ^ steps[uint8_t(sum) ^ uint8_t(byte)];
  return ~sum;
}

// Reads values one after the other, and raises an error at the end of the file and for numbers out
// of range: what a bundle says becomes addresses and sizes.
class BundleReader {
 public:
  BundleReader(std::string_view path, std::string_view rest) : path_(path), rest_(rest) {}

  void check(bool holds, const char* what) const {
    TORCH_CHECK(holds, "the bundle ", path_, " does not hold what it should: ", what);
  }

  std::string_view take(int64_t bytes) {
    check(bytes >= 0 && size_t(bytes) <= rest_.size(), "it ends early");
    const auto taken = rest_.substr(0, bytes);
    rest_.remove_prefix(bytes);
    return taken;
  }

  int64_t number() {
    int64_t value;
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }

  // Reads a number from 0 to limit - 1.
  int64_t below(int64_t limit) {
    const int64_t value = number();
    check(0 <= value && value < limit, "a number is out of range");
    return value;
  }

  // Reads the length of a list whose elements have at least 8 bytes each.
  int64_t count() { return below(int64_t(rest_.size() / 8) + 1); }

  std::string_view text() { return take(number()); }

  template <class Number = int64_t>
  std::vector<Number> numbers() {
    std::vector<Number> values(count());
    for (Number& value : values) value = Number(number());
    return values;
  }

  std::string_view rest() const { return rest_; }

 private:
  std::string_view path_, rest_;
};

inline MapParameters read_map(BundleReader& reader) {
  MapParameters map{bool(reader.below(2)), int(reader.below(16)), int(reader.below(4)),
                    int(reader.below(4))};
  map.sizes = reader.numbers<uint64_t>();
  map.strides = reader.numbers<uint64_t>();
  map.element_strides = reader.numbers<uint32_t>();
  map.box = reader.numbers<uint32_t>();
  map.lower = reader.numbers<int>();
  map.upper = reader.numbers<int>();
  const size_t rank = map.sizes.size(), corners = map.is_im2col ? rank - 2 : 0;
  reader.check(rank >= (map.is_im2col ? 3 : 1) && rank <= 5, "a tensor map has no such rank");
  reader.check(map.strides.size() == rank - 1 && map.element_strides.size() == rank &&
                   map.box.size() == (map.is_im2col ? 2 : rank) && map.lower.size() == corners &&
                   map.upper.size() == corners,
               "a tensor map is incomplete");
  return map;
}

inline BundledArgument read_argument(BundleReader& reader) {
  BundledArgument argument{reader.below(Argument::kMap + 1), reader.number()};
  reader.check(argument.kind == Argument::kInteger ||
                   (0 <= argument.value && argument.value < int64_t(kTensors)),
               "an argument is no tensor of a pass");
  if (argument.kind == Argument::kMap) argument.map = read_map(reader);
  return argument;
}

inline BundledLaunch read_launch(BundleReader& reader, size_t kernels) {
  const auto next = [&] { return unsigned(reader.below(kMostUnsigned)); };
  BundledLaunch launch{size_t(reader.below(kernels))};
  for (unsigned& blocks : launch.grid) blocks = next();
  launch.block = next();
  launch.shared_bytes = next();
  launch.early = reader.below(2);
  for (int64_t left = reader.count(); left > 0; --left) {
    launch.arguments.push_back(read_argument(reader));
  }
  return launch;
}

inline BundledEntry read_entry(BundleReader& reader, size_t kernels) {
  BundledEntry read{{reader.number(), reader.number(), reader.number()}};
  Entry& entry = read.entry;
  entry.shape = reader.numbers();
  entry.format = reader.below(2) ? channels_last(entry.shape.size()) : at::MemoryFormat::Contiguous;
  entry.bias_elements = reader.number();
  for (bool& copied : entry.copied) copied = reader.below(2);
  entry.scratch_bytes = reader.number();
  for (int64_t& region : entry.regions) region = reader.below(entry.scratch_bytes + 1);
  entry.packs = reader.number();
  read.is_filled = reader.below(2);
  for (int64_t left = reader.count(); left > 0; --left) {
    read.launches.push_back(read_launch(reader, kernels));
  }
  const size_t rank = entry.shape.size();
  reader.check((rank == 4 || rank == 5) && entry.bias_elements >= 0 && entry.scratch_bytes >= 0 &&
                   entry.packs <= read.launches.size(),
               "an entry has sizes that are none");
  return read;
}

inline void read_contents(BundleReader& reader, Bundle& bundle) {
  for (int64_t left = reader.count(); left > 0; --left) bundle.cubins.push_back(reader.text());
  for (int64_t left = reader.count(); left > 0; --left) {
    const size_t cubin = reader.below(bundle.cubins.size());
    bundle.kernels.push_back({cubin, std::string(reader.text()), reader.below(kMostUnsigned)});
  }
  for (int64_t left = reader.count(); left > 0; --left) {
    Key key = reader.numbers();
    bundle.entries.emplace(std::move(key), read_entry(reader, bundle.kernels.size()));
  }
  reader.check(reader.rest().empty(), "something follows its end");
}

// Reads a bundle and checks that it is whole, and of this version of fastconv.
inline std::unique_ptr<const Bundle> read_bundle(const std::string& path, std::string_view ours) {
  std::ifstream file(path, std::ios::binary);
  const std::string contents{std::istreambuf_iterator<char>(file), {}};
  TORCH_CHECK(file, "cannot read the bundle ", path, ": ", std::strerror(errno));
  auto bundle = std::make_unique<Bundle>(Bundle{path, contents});
  BundleReader reader(bundle->path, bundle->contents);
  TORCH_CHECK(std::string_view(contents).starts_with(kMagic), path,
              " is no bundle: `fastconv bundle` makes them");
  reader.take(kMagic.size());
  const int64_t format = reader.number(), bytes = reader.number(), sum = reader.number();
  TORCH_CHECK(format == kFormat, "the bundle ", path, " has format ", format,
              ", and this library reads format ", kFormat,
              ": make both by one version of fastconv");
  TORCH_CHECK(int64_t(reader.rest().size()) >= bytes, "the bundle ", path,
              " is truncated: ", reader.rest().size(), " of ", bytes, " bytes are there");
  TORCH_CHECK(crc32(reader.rest()) == sum, "the bundle ", path,
              " is damaged: it does not match its checksum");
  const std::string_view version = reader.text();
  TORCH_CHECK(version == ours, "the bundle ", path, " was made by fastconv ", version,
              ", and this library is of fastconv ", ours, ": make both by one version");
  read_contents(reader, *bundle);
  return bundle;
}

}  // namespace fastconv::host
