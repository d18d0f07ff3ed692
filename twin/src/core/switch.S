// void twin_switch(void** save, void* load): stores the callee-saved state of this stack in *save and goes on
// with the stack `load`. Fibers never change threads.
#if defined(__x86_64__)
    .text
    .globl twin_switch
    .hidden twin_switch
    .type twin_switch, @function
twin_switch:
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
    .size twin_switch, .-twin_switch

// The first frame of a fiber: rbx carries its argument, r12 its entry.
    .globl twin_fiber_start
    .hidden twin_fiber_start
    .type twin_fiber_start, @function
twin_fiber_start:
    movq %rbx, %rdi
    jmp *%r12
    .size twin_fiber_start, .-twin_fiber_start
#elif defined(__aarch64__)
    .text
    .globl twin_switch
    .hidden twin_switch
    .type twin_switch, %function
twin_switch:
    sub sp, sp, #176
    stp x19, x20, [sp, #0]
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
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #176
    ret
    .size twin_switch, .-twin_switch

// The first frame of a fiber: x19 carries its argument, x20 its entry. Branch target identification lets a
// function be entered by br from x16 and x17 only.
    .globl twin_fiber_start
    .hidden twin_fiber_start
    .type twin_fiber_start, %function
twin_fiber_start:
    mov x0, x19
    mov x30, xzr
    mov x17, x20
    br x17
    .size twin_fiber_start, .-twin_fiber_start
#endif
    .section .note.GNU-stack,"",%progbits
