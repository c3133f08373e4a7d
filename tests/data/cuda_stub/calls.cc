// Calls of exported files' launcher as Python makes them, of what would be kernels. A test says
// what the numbers of two maps are.
#include "launcher.cuh"

struct alignas(64) Map {
  unsigned char bytes[128];
};

void any(Map first, const float* bias, int n, Map second) {
  printf(" %d %lld %d %d\n", first.bytes[0], reinterpret_cast<long long>(bias), n, second.bytes[0]);
}

void plain(float* out) { printf(" %lld\n", reinterpret_cast<long long>(out)); }

int main() {
  start("any", any, {3, 32, 64, 1}, {{0x1000, TILED}, {0}, {7}, {0x2000, PIXELS}}, 0x57);
  start("plain", plain, {3, 32, 49152, 0}, {{5}}, 0);
  start("plain", plain, {3, 32, 49153, 0}, {{5}}, 0);
  try {
    start("any", any, {3, 32, 64, 0}, {{0, TILED}, {0}, {7}, {0x2000, PIXELS}}, 0);
  } catch (const std::runtime_error& error) {
    printf("%s\n", error.what());
  }
}
