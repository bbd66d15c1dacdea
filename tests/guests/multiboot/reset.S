/* Takes the CPU from its reset to flat 32-bit protected mode, inside the ROM, and
 * calls `firmware_main`; then starts the guest that it has loaded. */

        .set    MULTIBOOT_LOADED, 0x2BADB002
        .set    CODE_SELECTOR, 8
        .set    DATA_SELECTOR, 16
        .set    STACK_TOP, 0x7000

        .section .text.reset, "ax"
        .code32
in_protected_mode:
        movl    $DATA_SELECTOR, %eax
        movl    %eax, %ds
        movl    %eax, %es
        movl    %eax, %ss
        movl    $STACK_TOP, %esp
        subl    $8, %esp
        movl    %esp, %eax                      /* two words: entry, multiboot information */
        pushl   %eax
        call    firmware_main
        popl    %eax
        popl    %ecx
        popl    %ebx
        movl    $MULTIBOOT_LOADED, %eax
        jmp     *%ecx

        .align  8
gdt:    .quad   0
        .quad   0x00CF9B000000FFFF              /* code, marked as accessed: the CPU can't write here */
        .quad   0x00CF93000000FFFF              /* data, likewise */
gdt_pointer:
        .word   . - gdt - 1
        .long   gdt

        .code16
in_real_mode:
        cli
        cld
        lgdtl   %cs:(gdt_pointer - in_protected_mode)
        movl    %cr0, %eax
        orl     $1, %eax
        movl    %eax, %cr0
        ljmpl   $CODE_SELECTOR, $in_protected_mode

        /* Where the CPU starts, 16 bytes below 4 GiB: leaves for the copy of the
         * ROM below 1 MiB, as every firmware does. */
        .section .reset_vector, "ax"
        .code16
        .global at_reset
at_reset:
        ljmp    $0xF000, $(in_real_mode - in_protected_mode)
        .align  16

        .section .note.GNU-stack, "", @progbits
