/* What collectives cost: a table of measured seconds, kept in a file from one job to the next, by which a group chooses
 * how it moves its data (even_comm_choose).
 *
 * An entry is of one collective, one size, one make-up of a group (its shape), one engine and one of the engine's ways.
 * Any thread may use a table; several processes may keep theirs in one file. */
#ifndef EVENSTEP_COMM_COSTS_H
#define EVENSTEP_COMM_COSTS_H

#include <evenstep/comm.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct even_comm_costs even_comm_costs;

#define EVEN_COMM_COSTS_WORD 32   /* bytes of a name, its NUL included */
#define EVEN_COMM_COSTS_SHAPE 256 /* bytes of a shape */
#define EVEN_COMM_COSTS_MOST 4096 /* entries */

/* Of what a cost is. Texts are UTF-8 without control characters, none empty. */
typedef struct even_comm_cost_key {
  const char *collective; /* "all_reduce", "broadcast", … */
  const char *shape;  /* equal words for groups whose calls cost the same: hosts, ranks on each, processors, network */
  const char *engine; /* "shm", "ucx", "hosts", "gloo", … */
  const char *way;    /* one of the engine's ways of making the collective */
  uint64_t bytes;     /* of the whole exchange on one rank; it counts for the nearest power of two. 1 … 2^50 */
} even_comm_cost_key;

/* An entry. */
typedef struct even_comm_cost {
  char collective[EVEN_COMM_COSTS_WORD];
  char shape[EVEN_COMM_COSTS_SHAPE];
  char engine[EVEN_COMM_COSTS_WORD];
  char way[EVEN_COMM_COSTS_WORD];
  uint64_t bytes;   /* a power of two */
  double seconds;   /* of one call */
  uint32_t samples; /* that it was learnt from */
  int64_t at;       /* when the file got its last one: seconds since 1970, UTC; 0: in no file yet */
} even_comm_cost;

/* An empty table. Close it; groups that use it hold it meanwhile. */
EVEN_PUBLIC even_status even_comm_costs_open(even_comm_costs **out) EVEN_MUST_USE;
/* NULL is allowed. */
EVEN_PUBLIC void even_comm_costs_close(even_comm_costs *costs);

/* A measured call. The first sample of an entry is taken as it is. Each later one moves the entry towards it by
 * 1/(samples + 1) of the way between their logarithms, 1/16 at least, so that a lasting change is learnt in some tens
 * of samples; and counts as twice the known cost at most, and an eighth of it at least, so that a call that other work
 * held up is as good as forgotten. EVEN_ERR_ARGUMENT names what is wrong with the key or the seconds (> 0, finite);
 * EVEN_ERR_MEMORY. A full table loses the entry that has been there longest without a new sample. */
EVEN_PUBLIC even_status even_comm_costs_add(even_comm_costs *costs, const even_comm_cost_key *key,
                                            double seconds) EVEN_MUST_USE;
/* What a call costs as far as the table knows; false where it knows nothing of this collective, shape, engine and way.
 * Between two known sizes: on the line between them where both axes are logarithmic. Below the least: as that one.
 * Above the largest: that one's seconds for each byte. */
EVEN_PUBLIC bool even_comm_costs_find(even_comm_costs *costs, const even_comm_cost_key *key, double *seconds);
/* Entry `index` (in no particular order, stable while nothing is added or read); false behind the last. */
EVEN_PUBLIC bool even_comm_costs_at(even_comm_costs *costs, size_t index, even_comm_cost *out);

/* Adds a file's entries, but for those older than 90 days: networks and machines change. A file that is not there is an
 * empty one. EVEN_ERR_INPUT says what is wrong with one that is none of ours or is damaged, and where: nothing is taken
 * from it then. */
EVEN_PUBLIC even_status even_comm_costs_load(even_comm_costs *costs, const char *path) EVEN_MUST_USE;
/* Adds to the file what the table has learnt since it was loaded or last saved; makes the folder. Processes take turns,
 * and readers see the old file or the new one. Where a file is none of ours it stays as it is (EVEN_ERR_INPUT).
 * EVEN_ERR_IN_USE where the folder stays locked for a second. */
EVEN_PUBLIC even_status even_comm_costs_save(even_comm_costs *costs, const char *path) EVEN_MUST_USE;

/* ---- groups that choose by costs ---- */

typedef struct even_comm_choosing {
  size_t size;            /* sizeof(even_comm_choosing) */
  even_comm_costs *costs; /* of rank 0; NULL: by what the group's own calls cost, and nothing is kept */
  const char *shape;      /* of rank 0: the group's make-up; not NULL where there are costs */
  const char *way;        /* of rank 0: the name of a way to take whatever it costs; NULL: none */
  double
      measure_seconds; /* of rank 0: how long may be measured at once where the costs lack something; 0: not at all */
} even_comm_choosing;

/* Collective. Lets a group choose among its engine's ways by costs, which also learn from its calls from then on.
 * Rank 0's are the ones that count: it says in the words that announce a call which way that goes, and all ways give
 * the same bits. What rank 0's costs lack is measured at once, for `measure_seconds` at most and the call under way
 * then. "ucx", "hosts" (between the hosts): all_reduce of more than 8 KB and up to 1 MB (64 KB of many ranks): "parts"
 * (each rank reduces a part and sends it on) or "whole" (each sends all its data to each other, and all reduce all).
 *   "shm": staged data pass in "pieces-256K", "pieces-1M", "pieces-4M" or "pieces-16M", or what is nearest, of each
 * collective for itself; all_reduces also by a "chain" of ranks; never measured beforehand: costs say which size a
 * group begins with. "ucx", of 4 MB and more between links of different speeds: "fitted" (parts by the speeds) or
 * "parts"; of more than 8 KB: broadcast in "parts" that are passed on, or "whole" from the root; reduce_scatter and
 * all_gather with all at once ("direct") or one after the other ("pairs"). "hosts", of more than 1 MB (what is no
 * all_reduce: 64 KB): "lanes", "overlap" or "turns"; all_gather and broadcast also "direct", between all ranks.
 * EVEN_ERR_ARGUMENT names the ways where `way` is none of any engine; one of another engine's is passed over. Those of
 * "shm" count inside each host of "hosts", too. Without this call groups choose by what their own calls cost. Errors
 * are the same on all ranks. */
EVEN_PUBLIC even_status even_comm_choose(even_comm *comm, const even_comm_choosing *params) EVEN_MUST_USE;

/* Collective. What whole calls cost in this group, into rank 0's `costs` (NULL on the others), as way "call" of the
 * group's engine: all_reduce of 1 KB, 64 KB, 1 MB and 4 MB, as far as `seconds` reach; the smallest ones always. */
EVEN_PUBLIC even_status even_comm_measure(even_comm *comm, even_comm_costs *costs, const char *shape,
                                          double seconds) EVEN_MUST_USE;
/* The seconds of the all_reduces of an invented step by what even_comm_measure found: twenty of 1 KB, four of 64 KB,
 * and two of 4 MB. For choosing between engines; false where too little is known. */
EVEN_PUBLIC bool even_comm_costs_step(even_comm_costs *costs, const char *shape, const char *engine, double *seconds);

#ifdef __cplusplus
}
#endif
#endif
