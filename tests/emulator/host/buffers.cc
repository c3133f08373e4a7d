#include "buffers.h"

#include <sanitizer/asan_interface.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "runtime.h"

namespace emulator {

namespace {

constexpr ptrdiff_t kGuardBytes = 256 << 10;  // poisoned bytes on either side of a buffer

// A tensor, or a block's shared memory.
struct Buffer {
  std::string name;
  unsigned char* begin;
  ptrdiff_t bytes;
  bool is_tensor;
};

std::vector<Buffer> buffers;
bool tensors_are_shown = true;

bool is_near(const Buffer& buffer, const unsigned char* address) {
  const ptrdiff_t offset = address - buffer.begin;
  return -kGuardBytes <= offset && offset < buffer.bytes + kGuardBytes;
}

}  // namespace

unsigned char* allocate(const char* name, ptrdiff_t bytes, ptrdiff_t offset, bool is_tensor) {
  const ptrdiff_t total = (kGuardBytes + offset + bytes + kGuardBytes + 1023) / 1024 * 1024;
  auto* const memory = static_cast<unsigned char*>(aligned_alloc(1024, total));
  if (!memory) fail("no memory for %s", name);
  unsigned char* const begin = memory + kGuardBytes + offset;
  __asan_poison_memory_region(memory, begin - memory);
  __asan_poison_memory_region(begin + bytes, memory + total - (begin + bytes));
  buffers.push_back({name, begin, bytes, is_tensor});
  return begin;
}

unsigned char* find_or_read(const char* name, ptrdiff_t bytes, ptrdiff_t offset) {
  for (const Buffer& buffer : buffers) {
    if (buffer.name == name) return buffer.begin;
  }
  unsigned char* const begin = allocate(name, bytes, offset, true);
  if (fread(begin, 1, bytes, stdin) != size_t(bytes)) fail("%s is cut short", name);
  return begin;
}

void write_tensors() {
  for (const Buffer& buffer : buffers) {
    if (buffer.is_tensor) fwrite(buffer.begin, 1, buffer.bytes, stdout);
  }
}

void show_tensors(bool shown) {
  if (shown == tensors_are_shown) return;
  tensors_are_shown = shown;
  for (const Buffer& buffer : buffers) {
    if (!buffer.is_tensor) continue;
    if (shown) {
      __asan_unpoison_memory_region(buffer.begin, buffer.bytes);
    } else {
      __asan_poison_memory_region(buffer.begin, buffer.bytes);
    }
  }
}

bool are_tensors_shown() { return tensors_are_shown; }

bool is_near_tensor(const void* address) {
  for (const Buffer& buffer : buffers) {
    if (buffer.is_tensor && is_near(buffer, static_cast<const unsigned char*>(address))) {
      return true;
    }
  }
  return false;
}

void print_address(const unsigned char* address) {
  for (const Buffer& buffer : buffers) {
    if (!is_near(buffer, address)) continue;
    fprintf(stderr, "at byte %td of %s, which has %td\n", address - buffer.begin,
            buffer.name.c_str(), buffer.bytes);
  }
}

}  // namespace emulator
