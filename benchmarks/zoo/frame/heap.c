/* Counts the bytes that a process has from its heap, and the most that it ever had at once.

   Loaded before the C library (LD_PRELOAD), it passes each request on and adds up what malloc_usable_size says of the
   blocks. It sees what PyTorch's own counters do not: the scratch memory of kernels and of the libraries below them. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

static atomic_long in_use, most;

/* Likewise of blocks below 256 KiB: TensorFlow's counter of a CPU's memory leaves these out. */
enum { SMALL = 256 << 10 };
static atomic_long small_in_use, small_most;

/* dlsym itself may ask for memory before the real functions are known: such requests are served from here. */
static char early[1 << 16];
static size_t early_used;

static int is_early(const void *block) { return (const char *)block >= early && (const char *)block < early + sizeof early; }

static void *early_block(size_t bytes) {
    size_t start = (early_used + 15) & ~(size_t)15;
    if (start + bytes > sizeof early) return NULL;
    early_used = start + bytes;
    return early + start;
}

static void add(atomic_long *sum, atomic_long *highest_sum, long bytes) {
    long now = atomic_fetch_add(sum, bytes) + bytes;
    long highest = atomic_load(highest_sum);
    while (now > highest && !atomic_compare_exchange_weak(highest_sum, &highest, now)) {
    }
}

static void count(long bytes) {
    add(&in_use, &most, bytes);
    if (-SMALL < bytes && bytes < SMALL) add(&small_in_use, &small_most, bytes);
}

static void *counted(void *block) {
    if (block) count((long)malloc_usable_size(block));
    return block;
}

#define REAL(name) \
    static __typeof__(&name) real; \
    static int looking; \
    if (!real && !looking) { \
        looking = 1; \
        real = (__typeof__(&name))dlsym(RTLD_NEXT, #name); \
        looking = 0; \
    }

void *malloc(size_t bytes) {
    REAL(malloc)
    return real ? counted(real(bytes)) : early_block(bytes);
}

void *calloc(size_t count_of, size_t bytes) {
    REAL(calloc)
    return real ? counted(real(count_of, bytes)) : early_block(count_of * bytes);
}

void free(void *block) {
    REAL(free)
    if (!block || is_early(block)) return;
    count(-(long)malloc_usable_size(block));
    real(block);
}

void *realloc(void *block, size_t bytes) {
    REAL(realloc)
    if (is_early(block)) {
        void *moved = malloc(bytes);
        size_t left = (size_t)(early + sizeof early - (char *)block);
        if (moved) memcpy(moved, block, bytes < left ? bytes : left);
        return moved;
    }
    long before = block ? (long)malloc_usable_size(block) : 0;
    void *moved = real(block, bytes);
    if (moved || !bytes) count(-before);
    return counted(moved);
}

void *memalign(size_t alignment, size_t bytes) {
    REAL(memalign)
    return counted(real(alignment, bytes));
}

void *aligned_alloc(size_t alignment, size_t bytes) {
    REAL(aligned_alloc)
    return counted(real(alignment, bytes));
}

int posix_memalign(void **block, size_t alignment, size_t bytes) {
    REAL(posix_memalign)
    int error = real(block, alignment, bytes);
    if (!error) counted(*block);
    return error;
}

long heap_in_use(void) { return atomic_load(&in_use); }

long heap_most(void) { return atomic_load(&most); }

long heap_small_in_use(void) { return atomic_load(&small_in_use); }

long heap_small_most(void) { return atomic_load(&small_most); }

void heap_start_again(void) {
    atomic_store(&most, atomic_load(&in_use));
    atomic_store(&small_most, atomic_load(&small_in_use));
}
