#include "peer_memory.h"

#include "comm/kernels.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

#define PIECE ((size_t)256 * 1024)

static bool read_theirs(const peer_memory *with, void *into, const void *from, size_t bytes) {
  while (bytes > 0) {
    struct iovec here = {.iov_base = into, .iov_len = bytes};
    struct iovec there = {.iov_base = (void *)(uintptr_t)from, .iov_len = bytes};
    ssize_t got = process_vm_readv((pid_t)with->process, &here, 1, &there, 1, 0);
    if (got <= 0) {
      return false;
    }
    into = (char *)into + got;
    from = (const char *)from + got;
    bytes -= (size_t)got;
  }
  return true;
}

int bench_peer_open(peer_memory *out, even_comm *comm, int rank, float *own, size_t bytes) {
  *out = (peer_memory){.comm = comm, .rank = rank, .own = own, .bytes = bytes, .piece = malloc(PIECE)};
#ifdef PR_SET_PTRACER
  (void)prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0); /* where Yama lets parents alone look at a process */
#endif
  uint64_t told[2][2] = {{0}};
  told[rank][0] = (uint64_t)getpid();
  told[rank][1] = (uint64_t)(uintptr_t)own;
  if (even_comm_all_reduce(comm, told, 4, EVEN_U64, EVEN_SUM) != EVEN_OK) {
    return -1;
  }
  out->process = (long)told[1 - rank][0];
  out->theirs = (float *)(uintptr_t)told[1 - rank][1]; /* NOLINT(performance-no-int-to-ptr) */
  int32_t may = out->piece != NULL && read_theirs(out, out->piece, out->theirs, sizeof *own);
  if (even_comm_all_reduce(comm, &may, 1, EVEN_I32, EVEN_MIN) != EVEN_OK) {
    return -1;
  }
  return may;
}

void bench_peer_close(peer_memory *with) {
  free(with->piece);
  with->piece = NULL;
}

bool bench_peer_read(const peer_memory *with, void *into) {
  return read_theirs(with, into, with->theirs, with->bytes);
}

bool bench_peer_all_reduce(const peer_memory *with) {
  even_reduce_function *add = even_kernels_best()->reduce[EVEN_F32][EVEN_SUM];
  size_t half = with->bytes / 2 / PIECE * PIECE;
  size_t begin = with->rank == 0 ? 0 : half;
  size_t end = with->rank == 0 ? half : with->bytes;
  bool well = even_comm_barrier(with->comm) == EVEN_OK;
  for (size_t at = begin; at < end && well; at += PIECE) {
    size_t bytes = end - at < PIECE ? end - at : PIECE;
    float *own = with->own + at / sizeof *own;
    const void *sources[2] = {with->rank == 0 ? own : with->piece, with->rank == 0 ? with->piece : own};
    void *targets[1] = {own};
    well = read_theirs(with, with->piece, with->theirs + at / sizeof *own, bytes);
    add(targets, 1, sources, 2, bytes / sizeof *own, 1);
  }
  well = even_comm_barrier(with->comm) == EVEN_OK && well;
  size_t from = with->rank == 0 ? half : 0;
  size_t bytes = with->rank == 0 ? with->bytes - half : half;
  well = well && read_theirs(with, with->own + from / sizeof(float), with->theirs + from / sizeof(float), bytes);
  return even_comm_barrier(with->comm) == EVEN_OK && well; /* the other one may still read */
}
