/* Takes the CPU from multiboot's 32-bit protected mode to long mode with all
 * memory below MAPPED_GIB mapped one to one, then calls `guest_main`. Knows
 * nothing of the workload. Long mode, because q35 puts RAM above 4 GiB as soon
 * as a guest has 2.75 GiB. Ring 3, because some software KVMs run only that at
 * full speed and emulate the rest, instruction by instruction. */

        .set    MULTIBOOT_MAGIC, 0x1BADB002
        .set    MULTIBOOT_FLAGS, 3              /* aligned modules, memory map wanted */
        .set    MAPPED_GIB, 16
        .set    KERNEL_CODE, 0x08
        .set    USER_DATA, 0x10 | 3
        .set    USER_CODE, 0x18 | 3
        .set    TASK, 0x20
        .set    USER_FLAGS, 0x202               /* interrupts on */
        .set    COM1, 0x3f8

        .section .multiboot, "a"
        .align  4
        .long   MULTIBOOT_MAGIC, MULTIBOOT_FLAGS, -(MULTIBOOT_MAGIC + MULTIBOOT_FLAGS)

        .text
        .code32
        .global start
start:
        cli
        cld
        movl    $stack_top, %esp
        movl    %ebx, %ebp                      /* address of the multiboot information */

        /* Page directories: 2 MiB pages, present, writable, user, large. Accessed and
         * dirty are set already, so the CPU never writes to a table again. */
        movl    $page_directories, %edi
        xorl    %ecx, %ecx
1:      movl    %ecx, %eax
        shll    $21, %eax
        orl     $0xE7, %eax
        movl    %eax, (%edi, %ecx, 8)
        movl    %ecx, %eax
        shrl    $11, %eax
        movl    %eax, 4(%edi, %ecx, 8)
        incl    %ecx
        cmpl    $(MAPPED_GIB * 512), %ecx
        jne     1b

        movl    $page_directories + 0x27, %eax
        xorl    %ecx, %ecx
2:      movl    %eax, directory_pointers(, %ecx, 8)
        addl    $4096, %eax
        incl    %ecx
        cmpl    $MAPPED_GIB, %ecx
        jne     2b
        movl    $directory_pointers + 0x27, top_level

        movl    %cr4, %eax
        orl     $0x20, %eax                     /* PAE */
        movl    %eax, %cr4
        movl    $top_level, %eax
        movl    %eax, %cr3
        movl    $0xC0000080, %ecx               /* EFER.LME */
        rdmsr
        orl     $0x100, %eax
        wrmsr
        movl    %cr0, %eax
        orl     $0x80000000, %eax               /* PG */
        movl    %eax, %cr0
        lgdt    gdt_pointer
        ljmp    $KERNEL_CODE, $in_long_mode

        .code64
in_long_mode:
        xorl    %eax, %eax
        movl    %eax, %ds
        movl    %eax, %es
        movl    %eax, %ss
        movl    $stack_top, %esp
        movl    %ebp, %edi
        call    guest_main
3:      hlt
        jmp     3b

/* Returns to the caller in ring 3, with interrupts on. */
        .global enter_user_mode
enter_user_mode:
        movl    $task, %eax                     /* base of the task segment, in its three pieces */
        movw    %ax, gdt + TASK + 2
        shrl    $16, %eax
        movb    %al, gdt + TASK + 4
        movb    %ah, gdt + TASK + 7
        movl    $TASK, %eax
        ltr     %ax
        popq    %rcx
        movq    %rsp, %rdx
        pushq   $USER_DATA
        pushq   %rdx
        pushq   $USER_FLAGS
        pushq   $USER_CODE
        pushq   %rcx
        iretq

/* IRQ 0: counts, and acknowledges at the first interrupt controller. */
        .global on_timer
on_timer:
        pushq   %rax
        incq    ticks
        movb    $0x20, %al
        outb    %al, $0x20
        popq    %rax
        iretq

/* Every other interrupt is spurious: all other lines are masked. */
        .global on_spurious
on_spurious:
        iretq

/* The ring 3 part calls with a breakpoint instruction, which is delivered
 * everywhere. RDI = 0 sleeps until the next timer interrupt; anything else is a
 * letter for the serial port. */
        .global on_call
on_call:
        testl   %edi, %edi
        jnz     4f
        sti
        hlt
        iretq
4:      movl    $COM1 + 5, %edx
5:      inb     %dx, %al
        testb   $0x20, %al
        jz      5b
        movl    $COM1, %edx
        movl    %edi, %eax
        outb    %al, %dx
        iretq

        .data
        .align  8
gdt:    .quad   0
        .quad   0x00209A0000000000              /* 64-bit code, ring 0 */
        .quad   0x0000F20000000000              /* data, ring 3 */
        .quad   0x0020FA0000000000              /* 64-bit code, ring 3 */
        .quad   0x0000890000000067, 0           /* the task segment: 104 bytes at `task` */
gdt_pointer:
        .word   . - gdt - 1
        .long   gdt
task:   .long   0
        .quad   interrupt_stack_top             /* the stack of ring 0 */
        .skip   104 - 12

        .bss
        .align  4096
top_level:              .skip 4096
directory_pointers:     .skip 4096
page_directories:       .skip 4096 * MAPPED_GIB
interrupt_stack:        .skip 4096
interrupt_stack_top:
stack:                  .skip 16384
stack_top:
        .section .note.GNU-stack, "", @progbits
