/* Collectives between CPU ranks: of one host over shared memory, of several hosts over UCX or MPI.
 *
 * A group on one host is a shared segment that its ranks map. One rank creates the segment and hands
 * its descriptor to the others (inherited, or through /proc/PID/fd); each opens the group over it.
 * Calls are collective: every rank of the group makes the same calls in the same order.
 * One thread at a time may call a collective of one group (another one then has EVEN_ERR_STATE, and the group goes
 * on); several groups are independent, also of one process, whose threads may be ranks of one group.
 *
 * Every call that moves data can fail with EVEN_ERR_PEER_LOST (a rank that had opened the group died: within a tenth of
 * a second; one that was stopped: see even_comm_set_stop_grace; one that never comes: by the timeout), EVEN_ERR_REVOKED
 * (even_comm_revoke), EVEN_ERR_TIMEOUT, EVEN_ERR_MISMATCH (ranks made different calls: kind, count, dtype or op; or,
 * of one host, wait for one another, each in another group or for a message, and have for two seconds; where a process
 * has a thread that never calls into a group, it is not known that this one never will, and the timeout ends it; under
 * Python it is Python that is asked for such threads, and one that has not run any of it yet is not seen). After any of
 * these the group is unusable: close it. EVEN_ERR_ARGUMENT and EVEN_ERR_OVERFLOW come before anything is
 * announced: the group stays as it is, but peers that made the call wait for this rank. A child that a rank forks
 * inherits nothing of the group: its calls fail with EVEN_ERR_STATE, even_comm_revoke does nothing there, and
 * even_comm_close gives back its memory alone. Data are aligned to their elements, and may be NULL where there are none
 * (EVEN_ERR_ARGUMENT); no other pointer may be NULL but where it says so. */
#ifndef EVENSTEP_COMM_H
#define EVENSTEP_COMM_H

#include <evenstep/status.h>
#include <evenstep/telemetry.h>
#include <evenstep/types.h>
#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct even_comm even_comm;

/* Whether a group is over: its caller knows, say, that a rank is lost. Any thread, and often: it returns at once. */
typedef bool even_comm_over_call(void *context);

typedef struct even_comm_params {
  size_t size;            /* sizeof(even_comm_params) */
  int rank;               /* 0 … ranks-1 */
  int ranks;              /* 1 … 4096 */
  size_t arena_bytes;     /* each rank's part of the arena; the same on all ranks; may be 0 */
  double timeout_seconds; /* of one call, from its first wait on; <= 0: 1800 */
  int spin; /* < 0: chosen from the CPUs that the ranks may use; 0: never spin; else polls before sleeping (more than
               2^20 count as so many) */
  /* NULL, or asked some fifty times a second while this rank waits, and of groups over the network also while it is in
   * no call. Once it says so the group ends with EVEN_ERR_REVOKED. All ranks are expected to have somebody to ask who
   * says the same: whoever fails or leaves then waits for no other. A group made of others asks as `inside` does. */
  even_comm_over_call *over;
  void *over_context;
} even_comm_params;

/* Makes the segment for a group (rank 0, or any parent of the ranks). *fd is close-on-exec; the caller
 * owns it and may close it once all ranks have opened the group. params->rank is not looked at. Errors:
 * EVEN_ERR_ARGUMENT, EVEN_ERR_OVERFLOW (larger than memory can be), EVEN_ERR_MEMORY, EVEN_ERR_NO_SPACE and others of
 * the system's. */
EVEN_PUBLIC even_status even_comm_create_segment(const even_comm_params *params, int *fd) EVEN_MUST_USE;
/* The same, where it is known which processes will come: processes[r] as rank r (0: not known; the array may be NULL).
 * One that ends before it has opened the group is then noticed as one that ends later is, and not by the timeout. */
EVEN_PUBLIC even_status even_comm_create_segment_for(const even_comm_params *params, const long *processes,
                                                     int *fd) EVEN_MUST_USE;
/* Opens the group over a segment. The descriptor is duplicated: the caller keeps its own.
 * Returns when all ranks have come (or with an error by the timeout). Another process opens the descriptor by
 * open("/proc/PID/fd/FD", O_RDWR). Errors before anybody waits: EVEN_ERR_ARGUMENT, EVEN_ERR_INPUT (no group's segment),
 * EVEN_ERR_MISMATCH (made for other `ranks` or `arena_bytes`), EVEN_ERR_IN_USE (this rank is taken, now or before: a
 * segment is for one group), EVEN_ERR_UNSUPPORTED (another version's). */
EVEN_PUBLIC even_status even_comm_open(const even_comm_params *params, int fd, even_comm **out) EVEN_MUST_USE;
/* ---- groups over several hosts ---- */

/* How the ranks of a group over the network find one another. */
typedef struct even_comm_network {
  size_t size; /* sizeof(even_comm_network) */
  /* all (`ranks` times `bytes`) = `mine` of every rank, in rank order; collective, called a few times while the group
   * is opened. What it returns but EVEN_OK ends the opening with that status. */
  even_status (*gather)(void *context, const void *mine, size_t bytes, void *all);
  void *context;
  const char *library;    /* NULL: UCX's libucp.so.0 where the loader looks. The first one serves the whole process */
  const char *interfaces; /* as UCX_NET_DEVICES: "eth0", "mlx5_0:1,eth1"; NULL: that variable's, or UCX's own choice */
  int number;             /* what this rank is called in error texts; < 0: its rank */
  int reserved;           /* 0 */
} even_comm_network;

/* Opens a group over UCX, which is opened at run time: TCP, shared memory, RDMA, as UCX finds them. Collective; returns
 * when all ranks have come. Each rank's arena is its own memory, and no faster than any other. Sums are formed in rank
 * order. EVEN_ERR_NOT_FOUND without UCX, EVEN_ERR_UNSUPPORTED where another rank cannot use it. UCX reads its settings
 * from the environment when it is opened, and handles signals of crashes then, unless UCX_HANDLE_ERRORS is "none". */
EVEN_PUBLIC even_status even_comm_open_ucx(const even_comm_params *params, const even_comm_network *network,
                                           even_comm **out) EVEN_MUST_USE;

/* UCX's version ("1.13.1") into `text`; opens it, as even_comm_open_ucx does. EVEN_ERR_NOT_FOUND where it is not here.
 */
EVEN_PUBLIC even_status even_comm_ucx_version(const char *library, char *text, size_t bytes) EVEN_MUST_USE;

/* Opens a group over MPI, for ranks that its launcher (mpirun, srun) has started; the library is opened at run time:
 * Open MPI, MPICH and its kin (Intel MPI, MVAPICH), or any with MPI 5's standard ABI. network->library NULL: the one
 * that this process has already, else the first of the usual names. network->gather NULL: the group is all of the job,
 * in MPI's order (even_comm_mpi_place), and meets through MPI. network->interfaces has to be NULL: MPI chooses.
 * Collective; returns when all ranks have come. Only bytes go through MPI; sums are formed here, in rank order. MPI is
 * started where the process has not (with MPI_THREAD_MULTIPLE), and is then finalized at its exit; groups that are
 * still open when it is finalized, by whomever, are left. While MPI starts, and while a communicator is made, MPI
 * itself waits for the others, without a limit; it may end the job where a process dies, and otherwise a dead rank is
 * noticed by the timeout. Memory of a call that failed may be read or written by MPI until the process ends.
 * EVEN_ERR_NOT_FOUND without a library, EVEN_ERR_UNSUPPORTED where ranks are not in one job, where another rank has not
 * the same library, and where the process has started MPI for one thread alone. */
EVEN_PUBLIC even_status even_comm_open_mpi(const even_comm_params *params, const even_comm_network *network,
                                           even_comm **out) EVEN_MUST_USE;
/* This process's place in its MPI job; starts MPI, as even_comm_open_mpi does. `library` as there. */
EVEN_PUBLIC even_status even_comm_mpi_place(const char *library, int *rank, int *ranks) EVEN_MUST_USE;
/* What the library calls itself ("Open MPI v5.0.8") into `text`; opens it, but starts nothing. `library` as there. */
EVEN_PUBLIC even_status even_comm_mpi_version(const char *library, char *text, size_t bytes) EVEN_MUST_USE;

/* Groups between hosts that one group can be made of. */
#define EVEN_COMM_LANES 8

/* A group made of others: the ranks of each host over shared memory, some of each host over the network. */
typedef struct even_comm_hosts {
  size_t size; /* sizeof(even_comm_hosts) */
  int rank;
  int ranks;
  const int *host_of; /* the host of each rank; hosts are numbered from 0 in the order of their first ranks */
  even_comm *inside;  /* of this host's ranks, in rank order */
  even_comm *between; /* of the hosts' first ranks, in the order of the hosts, by even_comm_open_ucx or _mpi (others are
                       * EVEN_ERR_UNSUPPORTED); NULL on all other ranks */
  even_comm *everyone; /* of all ranks, for messages and all-to-all; NULL: these are EVEN_ERR_UNSUPPORTED */
  /* Further groups between the hosts, in which other ranks of each host carry a part of what crosses, and by which
   * others hear of a first rank that is stopped: with `between` so many, 8 at most; 0 stands for 1, `between` alone. */
  int lanes;
  even_comm *const *lane; /* lane[i]: lane i + 1, of the rank of each host that carries it (even_comm_lane_rank), in the
                           * order of the hosts; NULL where this rank does not. May be NULL where there are none */
} even_comm_hosts;

/* Which of a host's `ranks` ranks, in their order there, carries lane `lane` of `lanes`: each its own, where there are
 * enough of them; else the lanes are spread over those that there are. */
EVEN_PUBLIC int even_comm_lane_rank(int lane, int lanes, int ranks);

/* Presents them as one group, which owns them from then on (not after a failure). Collective among the ranks of a host.
 * Sums are formed on each host in rank order, then in the order of the hosts; 16-bit floats are rounded once on each
 * host and once more between them. The arena is that of `inside`. timeout_seconds as in even_comm_params. All-reduces
 * of more than 1 MB go in pieces, which are summed inside, cross between the hosts and are spread inside at the same
 * time, over the first ranks or over all lanes, or one after the other: what costs least (even_comm_choose). A thread
 * for each lane that this rank carries is started by the first of them. */
EVEN_PUBLIC even_status even_comm_open_hosts(const even_comm_hosts *params, double timeout_seconds,
                                             even_comm **out) EVEN_MUST_USE;

/* Leaves the group but keeps its memory mapped until even_comm_close: for callers whose arena is still looked at. Peers
 * that wait for this rank get EVEN_ERR_PEER_LOST; every later call on `comm` gets EVEN_ERR_STATE. */
EVEN_PUBLIC void even_comm_leave(even_comm *comm);
/* Leaves the group and unmaps it. NULL is allowed. Not collective: peers that wait for this rank get
 * EVEN_ERR_PEER_LOST. */
EVEN_PUBLIC void even_comm_close(even_comm *comm);

/* What the group was opened with, and this rank's memory: any thread, valid until even_comm_close. */
EVEN_PUBLIC int even_comm_rank(const even_comm *comm);
EVEN_PUBLIC int even_comm_ranks(const even_comm *comm);
/* How the group moves data: "shm" (shared memory of one host), "ucx", "mpi", "hosts" (shared memory on each host, UCX
 * or MPI between them). A static string. */
EVEN_PUBLIC const char *even_comm_engine_name(const even_comm *comm);
/* This rank's part of the arena (64-byte aligned, arena_bytes long). Ordinary memory for this rank between
 * collectives; a collective on a range of it moves no staging copy. NULL where arena_bytes is 0. */
EVEN_PUBLIC void *even_comm_arena(even_comm *comm);
EVEN_PUBLIC size_t even_comm_arena_bytes(const even_comm *comm);
/* Another rank's part, as long as this rank's own, where the memory is the same ("shm"); NULL else. What it holds is
 * that rank's to change: what it wrote there before a collective may be read after it, until the next one in which that
 * rank takes part; what a collective itself puts there, after the next one (a barrier, say). */
EVEN_PUBLIC const void *even_comm_peer_arena(const even_comm *comm, int rank);

/* In place on all ranks: data[i] = op over ranks. `data` in the arena (the same offset on every rank) is reduced
 * where it lies; any other memory is staged in cache-sized pieces. count elements. */
EVEN_PUBLIC even_status even_comm_all_reduce(even_comm *comm, void *data, size_t count, even_dtype dtype,
                                             even_reduce_op op) EVEN_MUST_USE;
/* output (counts[rank] elements) = op over ranks of input's part for this rank; the parts lie in input in rank
 * order, counts[r] elements for rank r (0 allowed); counts has `ranks` entries, the same on all ranks.
 * output may be this rank's own part of input, but may not overlap input in another way: the other parts are read
 * while output is written. */
EVEN_PUBLIC even_status even_comm_reduce_scatter(even_comm *comm, const void *input, void *output, const size_t *counts,
                                                 even_dtype dtype, even_reduce_op op) EVEN_MUST_USE;
/* output = the ranks' inputs in rank order; counts[r] elements come from rank r (0 allowed). In place when input
 * already lies at its place in output. */
EVEN_PUBLIC even_status even_comm_all_gather(even_comm *comm, const void *input, void *output, const size_t *counts,
                                             even_dtype dtype) EVEN_MUST_USE;
/* data (bytes long) of rank `root` on all ranks. */
EVEN_PUBLIC even_status even_comm_broadcast(even_comm *comm, void *data, size_t bytes, int root) EVEN_MUST_USE;
/* Each rank has a part for every rank, input_bytes[r] bytes at inputs[r], and gets one from each, output_bytes[r] at
 * outputs[r] (0 allowed). The sizes may differ from rank to rank; what r's input_bytes say of this rank must be
 * output_bytes[r] (EVEN_ERR_MISMATCH). No output may overlap an input. A gather is this with parts for the root only, a
 * scatter with parts from the root only; a reduce to one rank is a reduce-scatter in which all is that rank's. Over
 * "shm" up to 1022 ranks (EVEN_ERR_UNSUPPORTED in larger groups). */
EVEN_PUBLIC even_status even_comm_all_to_all(even_comm *comm, const void *const *inputs, const size_t *input_bytes,
                                             void *const *outputs, const size_t *output_bytes) EVEN_MUST_USE;
/* Returns when all ranks have called it. */
EVEN_PUBLIC even_status even_comm_barrier(even_comm *comm) EVEN_MUST_USE;

/* ---- messages from one rank to another ----
 * They go their own way: any thread may send and receive, also while another is inside a collective of the group.
 * Messages from one rank to another with one tag arrive in the order in which they were sent, and are received in the
 * order of the calls that receive. What fits the pair's ring is sent at once, a longer message while its receiver takes
 * it: rings hold 256 KB in groups of up to 32 ranks, and a quarter of it each time the ranks double (64 KB at 64, 4 KB
 * at 256). What has begun goes on in the background. Groups of up to EVEN_COMM_MESSAGE_RANKS ranks;
 * EVEN_ERR_UNSUPPORTED in larger ones. Failures of peers end the group, as in collectives. */

#define EVEN_COMM_ANY_RANK (-1)
#define EVEN_COMM_MESSAGE_RANKS 256

typedef struct even_comm_request even_comm_request;

/* Whether the group is small enough for messages. */
EVEN_PUBLIC bool even_comm_has_messages(const even_comm *comm);
/* Begins to send `bytes` at `data`, which stay untouched until the request is done, to rank `peer` (own rank allowed).
 */
EVEN_PUBLIC even_status even_comm_send_begin(even_comm *comm, const void *data, size_t bytes, int peer, uint64_t tag,
                                             even_comm_request **out) EVEN_MUST_USE;
/* Begins to receive the next message with that tag from rank `peer`, or from any (EVEN_COMM_ANY_RANK), of exactly
 * `bytes` bytes: the request fails with EVEN_ERR_MISMATCH where the message has another size, and leaves it where it
 * is. The sender is told so once somebody has waited for that request, unless the message has been received before it
 * hears: its next send, receive or collective, or the wait for one that is not done, fails with the same words (a
 * collective on all ranks, and the group with it). A wait that fails so leaves its own request under way. */
EVEN_PUBLIC even_status even_comm_receive_begin(even_comm *comm, void *data, size_t bytes, int peer, uint64_t tag,
                                                even_comm_request **out) EVEN_MUST_USE;
/* Whether the request is done, well or not; does what can be done for it at once. It waits for no message, but where
 * it finds that a rank is lost it tells the others, as a wait does: between hosts that may take some seconds. */
EVEN_PUBLIC bool even_comm_request_done(even_comm_request *request);
/* Returns when the request is done, with its outcome; *peer (NULL allowed) is the rank at the other end. After
 * timeout_seconds (<= 0: the group's) without an end: EVEN_ERR_TIMEOUT, and the group ends. The error names the peer as
 * late, and nobody where any rank could have come. */
EVEN_PUBLIC even_status even_comm_request_wait(even_comm_request *request, double timeout_seconds,
                                               int *peer) EVEN_MUST_USE;
/* Forgets a request; NULL is allowed. One that is not done is given up: where a part of its message has been moved, the
 * group is revoked, since what follows could not be understood. Before even_comm_close. */
EVEN_PUBLIC void even_comm_request_free(even_comm_request *request);

/* Ends every blocked and future call of the group on all ranks with EVEN_ERR_REVOKED. Any thread, any rank. */
EVEN_PUBLIC void even_comm_revoke(even_comm *comm);

/* Sets the limit of later calls; <= 0: 1800. Only this rank's limit: give all ranks the same. Any
 * thread; a call under way may see the old or the new one. */
EVEN_PUBLIC void even_comm_set_timeout(even_comm *comm, double seconds);

/* How long a peer may be stopped (SIGSTOP, Ctrl-Z) while this rank waits for it, before the group ends with
 * EVEN_ERR_PEER_LOST and its name; <= 0: 0.15 s, INFINITY: for ever (until the timeout). Where all ranks are stopped
 * and let go again nothing ends: nobody waits meanwhile. A debugger's stop does not count, nor one by a control group;
 * but a rank alone on its host, which nobody sees, counts as stopped when it has not answered for 60 times this.
 * Only this rank's patience; any thread. */
EVEN_PUBLIC void even_comm_set_stop_grace(even_comm *comm, double seconds);

/* Nanoseconds that this rank's calls have spent waiting for peers since the group was opened (polling and sleeping;
 * opening included). Only ever grows: take it before and after a call for that call's wait. Any thread. */
EVEN_PUBLIC uint64_t even_comm_wait_ns(const even_comm *comm);

/* Records the calls of the group from now on: counts them, and where records of calls are wanted, writes one each
 * (even_telemetry_call; some tens of ns a call). `name` is the same on all ranks of the group and no other group's of
 * theirs; collectives are numbered as in the flight record where this is called before any. NULL telemetry: not any
 * more; the group keeps its name, by which errors call it where several groups are spoken of. The telemetry outlives
 * the group. A group made of others (even_comm_open_hosts) is recorded as one. Between calls, and with no message under
 * way. EVEN_ERR_MEMORY, EVEN_ERR_ARGUMENT (no name). */
EVEN_PUBLIC even_status even_comm_record(even_comm *comm, even_telemetry *telemetry, const char *name) EVEN_MUST_USE;

/* How the group moves data now, in words for people: the engine, its ways, where its memory lies, and what was chosen
 * by measurement so far (it changes while the group runs). One line, cut to fit. By the thread that calls collectives,
 * between them. */
EVEN_PUBLIC void even_comm_describe(const even_comm *comm, char *text, size_t bytes);

/* The name of the SIMD path in use: "avx512", "avx2", "neon", "portable". */
EVEN_PUBLIC const char *even_comm_simd(void);

#ifdef __cplusplus
}
#endif
#endif
