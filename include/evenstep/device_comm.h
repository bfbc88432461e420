/* Collectives between GPUs, on device memory, through NCCL.
 *
 * NCCL (libnccl.so.2) and the CUDA driver (libcuda.so.1) are opened at run time: nothing here needs them to be linked,
 * and without them every call that would use them says EVEN_ERR_UNSUPPORTED and what is missing.
 *
 * A communicator is one rank's place in a group, on one GPU. Its calls are ordered on a CUDA stream that the caller
 * gives (a CUstream or cudaStream_t; torch's `torch.cuda.current_stream().cuda_stream`; NULL is the default stream).
 * They return when NCCL has put the work on the stream; nothing waits for the GPU. Data are device memory of the
 * communicator's GPU and must stay until the stream has passed the call. The stream must belong to that GPU.
 *
 * All ranks make the same calls in the same order. One thread at a time may call into a communicator, but poll and
 * abort, which any thread may call at any time; several communicators are independent of one another.
 *
 * Whoever waits for a stream cannot see why it stands still: NCCL itself notices no dead process on the same host, nor
 * that ranks make different calls. So a thread of the process looks fifty times a second at communicators that have
 * calls on streams, and ends one, by an abort that lets its streams go on, where
 *   - a call has been on the GPU for longer than the time limit (EVEN_ERR_TIMEOUT), or NCCL says an error of its own;
 * and, where the ranks know one another (`gather` of the parameters), among ranks of one host
 *   - a rank has died, or stands still for longer than the stop grace, or has left, before it made the call
 *     (EVEN_ERR_PEER_LOST, which names it), or
 *   - ranks make different calls (EVEN_ERR_MISMATCH, which names both sides; found before the second is launched).
 * All ranks of the host then end with the same words, and those of other hosts, too, where a group of the host's memory
 * goes beside (even_device_comm_go_beside). Calls that a stream captures for a CUDA graph are not watched.
 *
 * Statuses of a call on a communicator: EVEN_ERR_ARGUMENT and EVEN_ERR_OVERFLOW before NCCL is called (nothing has
 * happened); EVEN_ERR_UNSUPPORTED where NCCL has no such type, operation or function; EVEN_ERR_REVOKED after an abort;
 * EVEN_ERR_TIMEOUT where the host's part (connecting to peers, mostly) was not done within the time limit;
 * EVEN_ERR_PEER_LOST, EVEN_ERR_DEVICE, EVEN_ERR_SYSTEM, EVEN_ERR_STATE as NCCL says. The error names rank, device, call
 * and NCCL's own words. After any of those that came from NCCL, or a time-out, the communicator is broken: later calls
 * say EVEN_ERR_STATE with the first cause; abort or close it. What ends it while no thread is in a call is said by
 * even_device_comm_poll, and by each later call. No `comm`, `id` or `out` may be NULL but where it says so. */
#ifndef EVENSTEP_DEVICE_COMM_H
#define EVENSTEP_DEVICE_COMM_H

#include <evenstep/comm.h>
#include <evenstep/flight.h>
#include <evenstep/status.h>
#include <evenstep/telemetry.h>
#include <evenstep/types.h>
#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct even_device_comm even_device_comm;

#define EVEN_DEVICE_COMM_ID_BYTES 128

/* What ranks need to find each other: made by one, handed to the others as bytes by whatever way they have. */
typedef struct even_device_comm_id {
  unsigned char bytes[EVEN_DEVICE_COMM_ID_BYTES];
} even_device_comm_id;

/* ---- the libraries ---- */

/* Opens NCCL and the driver, if no earlier call has. `library` is a path or name of NCCL, NULL: EVENSTEP_NCCL_LIBRARY
 * of the environment, else libnccl.so.2 where the loader finds it (one that the process has loaded already, torch's
 * too, comes first). The driver is libcuda.so.1, or EVENSTEP_CUDA_LIBRARY. *version: 22703 is 2.27.3. Both stay open.
 * Errors: EVEN_ERR_UNSUPPORTED (not found; older than 2.18; a function is missing; the driver does not start). Any
 * thread. */
EVEN_PUBLIC even_status even_device_comm_library(const char *library, int *version) EVEN_MUST_USE;
/* A new identity for a group; needs NCCL but no GPU. Any thread. */
EVEN_PUBLIC even_status even_device_comm_make_id(const char *library, even_device_comm_id *out) EVEN_MUST_USE;

/* ---- communicators ---- */

typedef struct even_device_comm_params {
  size_t size;            /* sizeof(even_device_comm_params) */
  int rank;               /* 0 … ranks-1 */
  int ranks;              /* 1 … */
  int device;             /* the GPU, as the driver counts them in this process (CUDA_VISIBLE_DEVICES) */
  bool shares_device;     /* another rank of the group is on the same GPU; needs NCCL 2.30 and
                             NCCL_MULTI_RANK_GPU_ENABLE=1 in the environment of all ranks */
  bool blocking;          /* false: NCCL's non-blocking mode: the time limit and abort end every wait of the host, for a
                             thread that NCCL starts for each call. true: a call runs on the caller's thread, without a limit */
  double timeout_seconds; /* of the host's part of one call, and of the GPU's, from when the stream has come to it;
                             <= 0: 1800 */
  const char *library;    /* as in even_device_comm_library; may be NULL */
  /* How the ranks tell one another who they are, as in even_comm_network: called once, before NCCL begins. NULL, on all
   * ranks or on none: they do not know one another. Both are used in the opening alone. */
  even_status (*gather)(void *context, const void *mine, size_t bytes, void *all);
  void *context;
  const int *numbers; /* what the ranks are called in errors, of which this is a part; copied. NULL: as here */
  bool leave_abort;   /* a communicator that is ended by what was seen is not aborted: its calls say why it has ended,
                         and even_device_comm_shrink, or _abort, frees its streams */
  unsigned char reserved[7]; /* 0 */
} even_device_comm_params;

/* Comes together with the other ranks of `id`. As by the others below, *out is NULL where it fails. */
EVEN_PUBLIC even_status even_device_comm_open(const even_device_comm_params *params, const even_device_comm_id *id,
                                              even_device_comm **out) EVEN_MUST_USE;
/* Lets what is on the streams end (within the time limit, else it is aborted) and frees the communicator. NULL is
 * allowed. Collective as NCCL's own finalize is: ranks that close at the same time lose nothing. The status is what
 * went wrong on the way; the communicator is gone in any case but one: where another thread has a group of its calls
 * open and does not end it within the time limit, or a second where the communicator has ended, EVEN_ERR_TIMEOUT says
 * so and it stays, to be closed after that group's end (or that thread's). */
EVEN_PUBLIC even_status even_device_comm_close(even_device_comm *comm);
/* Ends what this rank has on the streams, unfinished, and every call under way on another thread (EVEN_ERR_REVOKED).
 * Later calls say EVEN_ERR_REVOKED; even_device_comm_close is still due. Ranks of this host that know this one end,
 * too, where something was unfinished; others see it as a failure of theirs or not at all: every rank aborts its own.
 * Any thread. In blocking mode a thread that is inside NCCL is given a second to come out; one that has a group open is
 * given one to end it, else its end ends what is on the streams. */
EVEN_PUBLIC void even_device_comm_abort(even_device_comm *comm);
/* Whether the communicator has ended, or anything has failed on the GPU or the network since (an asynchronous error of
 * NCCL): EVEN_OK, or its status. Sees which calls are done. Cheap; any thread. */
EVEN_PUBLIC even_status even_device_comm_poll(even_device_comm *comm) EVEN_MUST_USE;
/* Whether it has ended, for whatever reason; asks nobody. Any thread. */
EVEN_PUBLIC bool even_device_comm_has_ended(const even_device_comm *comm);
/* The limit of what is under way and of later calls; <= 0: 1800. Any thread. */
EVEN_PUBLIC void even_device_comm_set_timeout(even_device_comm *comm, double seconds);
/* A limit of the calls that follow alone, in place of that one; <= 0: they have none of their own again. On the thread
 * that makes them. */
EVEN_PUBLIC void even_device_comm_set_call_timeout(even_device_comm *comm, double seconds);

EVEN_PUBLIC int even_device_comm_rank(const even_device_comm *comm);
EVEN_PUBLIC int even_device_comm_ranks(const even_device_comm *comm);
EVEN_PUBLIC int even_device_comm_device(const even_device_comm *comm);

/* ---- what ranks know of one another ---- */

/* For communicators made by shrink, grow and join, whose ranks do not know one another at first: as `gather` and
 * `numbers` of the parameters. Collective, before the first call. */
EVEN_PUBLIC even_status even_device_comm_meet(even_device_comm *comm,
                                              const even_device_comm_params *params) EVEN_MUST_USE;
/* A group of the same ranks on the host's memory (any engine), which hears of deaths and stops on other hosts: a rank
 * that finds why the communicator has ended tells the ranks of other hosts through it, which ends that group too, and
 * where that group has ended because a rank was lost or it was revoked, calls of the communicator end. It stays open
 * until NULL is given here, or the communicator is closed. Any thread. */
EVEN_PUBLIC void even_device_comm_go_beside(even_device_comm *comm, even_comm *group);
/* As even_comm_set_stop_grace: how long a rank may be stopped while others wait for it; <= 0: 0.15. Any thread. */
EVEN_PUBLIC void even_device_comm_set_stop_grace(even_device_comm *comm, double seconds);
/* As even_comm_set_site, for the calls that follow. On the thread that makes them. */
EVEN_PUBLIC void even_device_comm_set_site(even_device_comm *comm, const char *text);
/* As even_comm_flight: the last collectives of `rank`, numbered from 1 (messages are not in it). One is done when the
 * GPU has passed it and that was seen. 0 where the ranks do not know one another. Any thread. */
EVEN_PUBLIC size_t even_device_comm_flight(const even_device_comm *comm, int rank, even_flight_call *out, size_t limit);
/* As even_comm_on_stall, for a call that has been on the GPU for so long. The thread that looks calls it: it must not
 * call into the communicator. Any thread. */
EVEN_PUBLIC void even_device_comm_on_stall(even_device_comm *comm, double seconds, even_comm_stall_call *call,
                                           void *context);
/* As even_comm_record. A record is written when the call is seen to be done: start and duration are the GPU's, by
 * events before and behind it; what of it was waiting is not known (0). Between calls, with none on a stream. */
EVEN_PUBLIC even_status even_device_comm_record(even_device_comm *comm, even_telemetry *telemetry,
                                                const char *name) EVEN_MUST_USE;

/* A communicator of the ranks that are not in excluded[count] (numbers of `comm`), in their order; called by those that
 * stay. abort: what is under way on `comm` is ended first, for use after a failure. `comm` stays, to be closed. NCCL
 * 2.27, else EVEN_ERR_UNSUPPORTED. */
EVEN_PUBLIC even_status even_device_comm_shrink(even_device_comm *comm, const int *excluded, int count, bool abort,
                                                even_device_comm **out) EVEN_MUST_USE;
/* Growing to `ranks` ranks: one rank of `comm` makes an id (grow_id), hands it to the new ranks only, and calls grow
 * with it; the others of `comm` call grow with NULL; the new ones call join with params of the new group. `comm` stays,
 * to be closed. NCCL 2.29, else EVEN_ERR_UNSUPPORTED. */
EVEN_PUBLIC even_status even_device_comm_grow_id(even_device_comm *comm, even_device_comm_id *out) EVEN_MUST_USE;
EVEN_PUBLIC even_status even_device_comm_grow(even_device_comm *comm, int ranks, const even_device_comm_id *id,
                                              even_device_comm **out) EVEN_MUST_USE;
EVEN_PUBLIC even_status even_device_comm_join(const even_device_comm_params *params, const even_device_comm_id *id,
                                              even_device_comm **out) EVEN_MUST_USE;

/* ---- reductions ----
 * Operations: SUM, AVG (floating types), PRODUCT, MIN, MAX; BAND, BOR and BXOR are not NCCL's. Types: all but I16 and
 * U16. SUM of BOOL is OR. factor: NULL, or (with SUM and a floating type) what each of this rank's elements is
 * multiplied by before it is added: ranks may differ (NCCL's PreMulSum). Input and output may be the same memory where
 * it says so, but may not overlap otherwise. The order of addition is NCCL's: bits may differ from the host engine's.
 */

/* output[i] = op over ranks of input[i]; output may be input. */
EVEN_PUBLIC even_status even_device_comm_all_reduce(even_device_comm *comm, const void *input, void *output,
                                                    size_t count, even_dtype dtype, even_reduce_op op,
                                                    const double *factor, void *stream) EVEN_MUST_USE;
/* The same on the root alone; the others' output is not looked at and may be NULL. */
EVEN_PUBLIC even_status even_device_comm_reduce(even_device_comm *comm, const void *input, void *output, size_t count,
                                                even_dtype dtype, even_reduce_op op, const double *factor, int root,
                                                void *stream) EVEN_MUST_USE;
/* output = op over ranks of this rank's part of input, where the parts lie in rank order, counts[r] elements for rank r
 * (0 allowed; the same on all ranks). Equal parts are one call of NCCL, unequal ones a reduce for each. output may be
 * this rank's own part of input. */
EVEN_PUBLIC even_status even_device_comm_reduce_scatter(even_device_comm *comm, const void *input, void *output,
                                                        const size_t *counts, even_dtype dtype, even_reduce_op op,
                                                        const double *factor, void *stream) EVEN_MUST_USE;

/* ---- moves: bytes, of any type ---- */

/* output = the ranks' inputs in rank order, bytes[r] from rank r (0 allowed; the same on all ranks). In place where
 * input lies at its place in output. Equal parts are one call of NCCL, unequal ones a broadcast for each. */
EVEN_PUBLIC even_status even_device_comm_all_gather(even_device_comm *comm, const void *input, void *output,
                                                    const size_t *bytes, void *stream) EVEN_MUST_USE;
/* data of rank root on all ranks. */
EVEN_PUBLIC even_status even_device_comm_broadcast(even_device_comm *comm, void *data, size_t bytes, int root,
                                                   void *stream) EVEN_MUST_USE;
/* inputs[r] (input_bytes[r] bytes) goes to rank r, outputs[r] comes from it; 0 bytes: nothing, and the address may be
 * NULL. Grouped sends and receives. */
EVEN_PUBLIC even_status even_device_comm_all_to_all(even_device_comm *comm, const void *const *inputs,
                                                    const size_t *input_bytes, void *const *outputs,
                                                    const size_t *output_bytes, void *stream) EVEN_MUST_USE;
/* Every rank's input (bytes[rank] long; bytes is the same on all ranks) at outputs[r] of the root; outputs is looked at
 * there only. */
EVEN_PUBLIC even_status even_device_comm_gather(even_device_comm *comm, const void *input, void *const *outputs,
                                                const size_t *bytes, int root, void *stream) EVEN_MUST_USE;
/* The root's inputs[r], bytes[r] long, in rank r's output. */
EVEN_PUBLIC even_status even_device_comm_scatter(even_device_comm *comm, const void *const *inputs, void *output,
                                                 const size_t *bytes, int root, void *stream) EVEN_MUST_USE;
/* To and from one peer, in the order of the calls; there are no tags. A send waits on the stream for its receive. To
 * the own rank inside a group only. */
EVEN_PUBLIC even_status even_device_comm_send(even_device_comm *comm, const void *data, size_t bytes, int peer,
                                              void *stream) EVEN_MUST_USE;
EVEN_PUBLIC even_status even_device_comm_receive(even_device_comm *comm, void *data, size_t bytes, int peer,
                                                 void *stream) EVEN_MUST_USE;
/* The stream goes on when it has come to this call on all ranks. */
EVEN_PUBLIC even_status even_device_comm_barrier(even_device_comm *comm, void *stream) EVEN_MUST_USE;

/* Calls between begin and end are one operation of NCCL: sends and receives between them do not wait for one another.
 * Groups of one communicator nest; a thread has one communicator's group open at a time (EVEN_ERR_STATE). A call that
 * fails inside leaves the group open: end it (its status is the failure's). Other threads' calls wait for the end of
 * the outermost one, within the time limit (EVEN_ERR_TIMEOUT). A thread that ends with one open ends the communicator
 * with it, on all ranks of the host (EVEN_ERR_STATE). */
EVEN_PUBLIC even_status even_device_comm_group_begin(even_device_comm *comm) EVEN_MUST_USE;
EVEN_PUBLIC even_status even_device_comm_group_end(even_device_comm *comm) EVEN_MUST_USE;

#ifdef __cplusplus
}
#endif
#endif
