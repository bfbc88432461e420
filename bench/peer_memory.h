/* Another process's memory, read by the kernel's own call (process_vm_readv, "cross-memory attach"), as MPI libraries
 * do on one host; beside the ways that are used. Two ranks. */
#ifndef EVEN_BENCH_PEER_MEMORY_H
#define EVEN_BENCH_PEER_MEMORY_H

#include <evenstep/comm.h>
#include <stdbool.h>
#include <stddef.h>

typedef struct peer_memory {
  even_comm *comm;
  long process;  /* the other rank's */
  float *theirs; /* its data, an address of its own */
  float *own;
  float *piece; /* a piece of theirs */
  size_t bytes;
  int rank;
} peer_memory;

/* Tells the other rank of `own`, of `bytes`, and learns of its. 1 where both ranks may read each other's, 0 where the
 * kernel refuses one of them, -1 where a collective failed. All ranks call it. Release with bench_peer_close. */
int bench_peer_open(peer_memory *out, even_comm *comm, int rank, float *own, size_t bytes);
void bench_peer_close(peer_memory *with);

/* All of the other rank's data into `into`. False: it failed. */
bool bench_peer_read(const peer_memory *with, void *into);
/* Both ranks' data become their sums: each reads a half of the other's in pieces that stay in its caches, adds it to
 * its own, and then the other half's sums to where they belong: each byte is copied once. False: it failed. */
bool bench_peer_all_reduce(const peer_memory *with);

#endif
