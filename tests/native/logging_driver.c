// A CUDA driver that writes what it is asked to stderr, a line for each call that has an effect.
//
// A "cubin" is text with a word "name:kinds" for each kernel. The kinds are a letter for each of its
// parameters: p for an address, i for an int, m for a tensor map. The GPU has the compute capability
// and the SMs of the environment variable LOGGED_GPU, "9 0 132".
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct function {
  char name[128], kinds[128];
};

int cuGetErrorString(int status, const char** words) {
  *words = "logged";
  return 0;
}

int cuDeviceGet(int* device, int index) {
  *device = index;
  return 0;
}

int cuDeviceGetAttribute(int* value, int attribute, int device) {
  int major = 9, minor = 0, sms = 132;
  const char* chosen = getenv("LOGGED_GPU");
  if (chosen) sscanf(chosen, "%d %d %d", &major, &minor, &sms);
  *value = attribute == 75 ? major : attribute == 76 ? minor : attribute == 16 ? sms : -1;
  return 0;
}

int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = (void*)0xC0;
  return 0;
}

int cuCtxPushCurrent_v2(void* context) { return context == (void*)0xC0 ? 0 : 1; }
int cuCtxPopCurrent_v2(void** context) { return 0; }

int cuCtxSetCurrent(void* context) {
  fprintf(stderr, "context\n");
  return 0;
}

int cuThreadExchangeStreamCaptureMode(int* mode) {
  static int current = 0;
  const int before = current;
  current = *mode;
  *mode = before;
  return 0;
}

int cuModuleLoadData(void** module, const void* cubin) {
  fprintf(stderr, "module\n");
  *module = strdup(cubin);
  return strchr(cubin, ':') ? 0 : 200;
}

int cuModuleGetFunction(void** found, void* module, const char* name) {
  struct function* function = malloc(sizeof *function);
  snprintf(function->name, sizeof function->name, "%s", name);
  char start[130];
  snprintf(start, sizeof start, " %s:", name);
  const char* at = strstr(module, start);
  if (!at) return 500;
  sscanf(at + strlen(start), "%127[a-z]", function->kinds);
  *found = function;
  return 0;
}

int cuFuncGetAttribute(int* value, int attribute, void* function) {
  *value = 16;
  return attribute == 1 ? 0 : 1;
}

int cuFuncSetAttribute(void* function, int attribute, int value) {
  fprintf(stderr, "attribute %s %d %d\n", ((struct function*)function)->name, attribute, value);
  return 0;
}

static void print_longs(const char* name, const uint64_t* values, unsigned count) {
  fprintf(stderr, " %s", name);
  for (unsigned i = 0; i < count; ++i) fprintf(stderr, ",%llu", (unsigned long long)values[i]);
}

static void print_ints(const char* name, const int* values, unsigned count) {
  fprintf(stderr, " %s", name);
  for (unsigned i = 0; i < count; ++i) fprintf(stderr, ",%d", values[i]);
}

static int maps = 0;

// A map holds the address of its tensor and then its number.
static int new_map(void* map) {
  ((uint64_t*)map)[1] = maps;
  return (uintptr_t)map % 64 ? 1 : 0;
}

int cuTensorMapEncodeTiled(void* map, int type, unsigned rank, void* address, const uint64_t* sizes,
                           const uint64_t* strides, const unsigned* box, const unsigned* element,
                           int interleave, int swizzle, int promotion, int fill) {
  fprintf(stderr, "map %d 0 %d %d %d", ++maps, type, swizzle, promotion);
  print_longs("sizes", sizes, rank);
  print_longs("strides", strides, rank - 1);
  print_ints("element", (const int*)element, rank);
  print_ints("box", (const int*)box, rank);
  fprintf(stderr, " lower upper\n");
  return interleave || fill || !address ? 1 : new_map(map);
}

int cuTensorMapEncodeIm2col(void* map, int type, unsigned rank, void* address,
                            const uint64_t* sizes, const uint64_t* strides, const int* lower,
                            const int* upper, unsigned channels, unsigned pixels,
                            const unsigned* element, int interleave, int swizzle, int promotion,
                            int fill) {
  fprintf(stderr, "map %d 1 %d %d %d", ++maps, type, swizzle, promotion);
  print_longs("sizes", sizes, rank);
  print_longs("strides", strides, rank - 1);
  print_ints("element", (const int*)element, rank);
  fprintf(stderr, " box,%u,%u", channels, pixels);
  print_ints("lower", lower, rank - 2);
  print_ints("upper", upper, rank - 2);
  fprintf(stderr, "\n");
  return interleave || fill || !address ? 1 : new_map(map);
}

int cuTensorMapReplaceAddress(void* map, void* address) {
  *(void**)map = address;
  return (uintptr_t)map % 64 ? 1 : 0;
}

static int failing = 0;  // the status of the next launch, which LOGGED_STATUS sets

int cuLaunchKernel(void* f, unsigned x, unsigned y, unsigned z, unsigned a, unsigned b, unsigned c,
                   unsigned bytes, void* stream, void** arguments, void** extra) {
  const struct function* function = f;
  const char* status = getenv("LOGGED_STATUS");
  if (status && !failing++) return atoi(status);
  fprintf(stderr, "launch %s %u,%u,%u %u %u", function->name, x, y, z, a * b * c, bytes);
  for (size_t i = 0; i < strlen(function->kinds); ++i) {
    const char kind = function->kinds[i];
    const uint64_t* value = arguments[i];
    if (kind == 'p') fprintf(stderr, " p,%llu", (unsigned long long)value[0]);
    if (kind == 'i') fprintf(stderr, " i,%d", *(const int*)value);
    if (kind == 'm') {
      fprintf(stderr, " m,%llu,%llu", (unsigned long long)value[1], (unsigned long long)value[0]);
    }
  }
  fprintf(stderr, "\n");
  return stream || extra ? 1 : 0;
}

struct attribute {
  int id, pad;
  union {
    char all[64];
    int allowed;
    void* aligned;
  } value;
};

struct config {
  unsigned x, y, z, a, b, c, bytes;
  void* stream;
  struct attribute* attributes;
  unsigned count;
};

int cuLaunchKernelEx(const struct config* o, void* f, void** arguments, void** extra) {
  if (o->count != 1 || o->attributes->id != 6 || o->attributes->value.allowed != 1) return 1;
  fprintf(stderr, "early ");
  return cuLaunchKernel(f, o->x, o->y, o->z, o->a, o->b, o->c, o->bytes, o->stream, arguments,
                        extra);
}
