// fastconv in a program without Python: link it with libfastconv.so, which registers the operators
// torch.ops.fastconv.* with PyTorch.
#pragma once

namespace fastconv {

// Reads a bundle, a file that `fastconv bundle` has written: how calls on a GPU are computed. The
// environment variable FASTCONV_BUNDLE names bundles as well, separated by colons. Calls on a CPU
// need none. Raises a c10::Error for a file that is no whole bundle of this version of fastconv.
[[gnu::visibility("default")]] void load_bundle(const char* path);

}  // namespace fastconv
