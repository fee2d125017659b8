/* The Makefile compiles llama.cpp with this in front. GCC before 11.5, 12.4 and 13.3 (Debian 12 has 12.2) says that AMX's ldtilecfg reads 8 bytes
 * of the 64 that it reads (PR target/114098). It then drops the other stores as dead, and the first prompt on a CPU with AMX ends by SIGSEGV. */
#if defined(__AMX_TILE__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
#define _tile_loadconfig(config) __asm__ volatile("ldtilecfg %0" : : "m"(*(const char(*)[64])(config)))
#endif
