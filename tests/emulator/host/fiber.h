// Switches between the fibers that CUDA threads are. Only runtime.cc includes it.
#pragma once

// Saves the callee-saved registers on the stack, stores the stack pointer through `from`, and
// continues where `to` was saved. Unlike swapcontext it makes no system call, and ASan does not
// intercept it, which would clear the redzones of the stack.
extern "C" void emulator_switch(void** from, void* to);

#if defined(__x86_64__)
asm(R"(
.text
.globl emulator_switch
.type emulator_switch, @function
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulator_switch, . - emulator_switch
)");
constexpr int kSavedWords = 8;  // six registers, the return address, one word of alignment
constexpr int kReturnAddress = 6;
#elif defined(__aarch64__)
asm(R"(
.text
.globl emulator_switch
.type emulator_switch, %function
emulator_switch:
  sub sp, sp, #160
  stp x19, x20, [sp]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size emulator_switch, . - emulator_switch
)");
constexpr int kSavedWords = 20;
constexpr int kReturnAddress = 11;
#else
#error "write emulator_switch for this CPU"
#endif
