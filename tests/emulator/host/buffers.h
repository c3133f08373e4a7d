// The tensors of a launch and the shared memory of its blocks, between poisoned zones (buffers.cc).
#pragma once
#include <cstddef>

namespace emulator {

// Memory of exactly this size between poisoned zones, `offset` bytes after a multiple of 1024.
unsigned char* allocate(const char* name, ptrdiff_t bytes, ptrdiff_t offset, bool is_tensor);

// Reads a tensor from stdin, unless it was an earlier argument too.
unsigned char* find_or_read(const char* name, ptrdiff_t bytes, ptrdiff_t offset);

// Writes all tensors to stdout, in the order in which they were read.
void write_tensors();

// Allows accesses of tensors, or makes ASan report them.
void show_tensors(bool shown);
bool are_tensors_shown();

// Prints to stderr which buffer an address lies in or next to, if any.
void print_address(const unsigned char* address);

}  // namespace emulator
