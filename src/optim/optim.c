/* The states' memory: how it is laid out, and how all ranks of a host come by it. */
#include "optim/states.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/fail.h"
#include "base/params.h"
#include "os/calls.h"
#include "os/process_stat.h"

#include <string.h>

#define LINE ((size_t)64)

/* ---- the layout: a function of the parameters, and of whether there are others ---- */

static even_status check_params(const even_optim_params *params) {
  for (size_t i = 0; i < params->parameter_count; i++) {
    const even_optim_parameter *one = &params->parameters[i];
    if (one->dtype != EVEN_F32 && one->dtype != EVEN_F64 && !even_optim_is_short(one->dtype)) {
      return even_fail(EVEN_ERR_ARGUMENT,
                       "parameter %zu: an optimizer of dtype %d: F32, F64, F16 and BF16 are possible", i,
                       (int)one->dtype);
    }
    if (one->states < 0 || one->states > EVEN_OPTIM_STATES) {
      return even_fail(EVEN_ERR_ARGUMENT, "parameter %zu: %d states: 0 … %d are possible", i, one->states,
                       EVEN_OPTIM_STATES);
    }
  }
  return EVEN_OK;
}

/* `count` numbers at the end of the layout. */
static bool put(size_t count, size_t bytes, size_t *total, size_t *at) {
  size_t all = 0;
  *at = *total;
  return even_multiply_size(count, bytes, &all) && even_add_size(*total, all, total) &&
         even_align_size(*total, LINE, total) && *total <= (size_t)INT64_MAX;
}

/* Bytes of an element that a step changes, but for its value, at most. */
static size_t most_kept(const even_optim_params *params) {
  size_t most = 0;
  for (size_t i = 0; i < params->parameter_count; i++) {
    const even_optim_parameter *one = &params->parameters[i];
    size_t numbers = (size_t)one->states + (even_optim_is_short(one->dtype) ? 1 : 0);
    size_t bytes = numbers * even_optim_wide_bytes(one->dtype);
    most = bytes > most ? bytes : most;
  }
  return most;
}

static even_status lay_out(even_optim *optim, const even_optim_params *params, size_t *total) {
  size_t words = 0;
  *total = 0;
  bool fits = put(optim->piece_count, sizeof(_Atomic uint64_t), total, &words) &&
              put(optim->piece_count, sizeof(_Atomic uint64_t), total, &optim->sums) &&
              put(optim->piece_count, sizeof(double), total, &optim->squares);
  if (optim->survives) {
    fits = fits &&
           even_align_size(sizeof(even_optim_kept) + EVEN_OPTIM_PIECE * most_kept(params), LINE, &optim->kept_stride) &&
           put((size_t)optim->ranks, optim->kept_stride, total, &optim->kept);
  }
  for (size_t i = 0; i < params->parameter_count && fits; i++) {
    const even_optim_parameter *from = &params->parameters[i];
    even_optim_place *to = &optim->places[i];
    *to = (even_optim_place){
        .count = from->count, .dtype = from->dtype, .states = from->states, .values = EVEN_OPTIM_NOWHERE};
    size_t bytes = even_optim_wide_bytes(from->dtype);
    for (int k = 0; k < from->states && fits; k++) {
      fits = put(from->count, bytes, total, &to->state[k]);
    }
    if (fits && (optim->ranks > 1 || even_optim_is_short(from->dtype))) {
      fits = put(from->count, bytes, total, &to->values);
    }
  }
  if (!fits) {
    return even_fail(EVEN_ERR_OVERFLOW, "the states of these parameters are larger than memory can be");
  }
  *total += *total == 0 ? LINE : 0;
  return EVEN_OK;
}

/* ---- opening ---- */

/* What each rank tells the others, once it has done its part. */
typedef struct word {
  int32_t status;
  int32_t fd;
  even_optim_process process;
  uint64_t bytes;
  uint64_t signature; /* of the parameters */
} word;

/* FNV-1a. */
static uint64_t mix(uint64_t hash, uint64_t value) {
  for (int shift = 0; shift < 64; shift += 8) {
    hash = (hash ^ (value >> shift & 0xff)) * 0x100000001b3u;
  }
  return hash;
}

static uint64_t signature_of(const even_optim_params *params) {
  uint64_t hash = mix(0xcbf29ce484222325u, params->survives);
  for (size_t i = 0; i < params->parameter_count; i++) {
    const even_optim_parameter *one = &params->parameters[i];
    hash = mix(mix(mix(hash, one->count), (uint64_t)one->dtype), (uint64_t)one->states);
  }
  return hash;
}

/* All ranks' words, where none of them has failed; else this rank's error, or that of another one. */
static even_status tell(const even_optim *optim, const word *own, word *all, const size_t *counts) {
  even_error mine = *even_error_last();
  EVEN_TRY(even_comm_all_gather(optim->comm, own, all, counts, EVEN_U8));
  if (own->status != EVEN_OK) {
    return even_error_restore(&mine);
  }
  for (int r = 0; r < optim->ranks; r++) {
    if (all[r].status != EVEN_OK) {
      (void)even_fail((even_status)all[r].status, "rank %d has no memory for the optimizer's states: %s", r,
                      even_status_text((even_status)all[r].status));
      return even_error_place(r, NULL);
    }
    if (all[r].signature != own->signature) {
      (void)even_fail(EVEN_ERR_MISMATCH, "rank %d gives an optimizer other parameters than rank %d", r, optim->rank);
      (void)even_error_place(r, NULL);
      return even_error_fix("all ranks must have the same parameters, of the same dtypes, in the same order");
    }
  }
  return EVEN_OK;
}

/* The first rank's memory on all ranks. `status`: how this rank has fared so far. */
static even_status share(even_optim *optim, even_status status, const word *mine, word *all, const size_t *counts) {
  word own = *mine;
  size_t bytes = (size_t)own.bytes;
  if (status == EVEN_OK && optim->rank == 0) {
    status = even_shared_memory_create("evenstep-optim", bytes, &optim->memory);
    own.fd = optim->memory.fd;
  }
  own.status = (int32_t)status;
  EVEN_TRY(tell(optim, &own, all, counts));
  if (optim->rank != 0) {
    status = even_shared_memory_open_peer((pid_t)all[0].process.number, all[0].fd, &optim->memory);
  }
  if (status == EVEN_OK && optim->memory.bytes < bytes) {
    status = even_fail(EVEN_ERR_INPUT, "the optimizer's shared memory is cut short: %zu of %zu bytes",
                       optim->memory.bytes, bytes);
  }
  own.status = (int32_t)status;
  EVEN_TRY(tell(optim, &own, all, counts));
  for (int r = 0; r < optim->ranks && optim->survives; r++) {
    optim->processes[r] = all[r].process;
  }
  return EVEN_OK;
}

/* Collective. */
static even_status open_shared(even_optim *optim, even_status status, size_t bytes, uint64_t signature) {
  size_t ranks = (size_t)optim->ranks;
  word *all = NULL;
  size_t *counts = NULL;
  word own = {.fd = -1, .process = {.number = even_os.getpid()}, .bytes = bytes, .signature = signature};
  even_process_stat facts = {0};
  (void)even_process_stat_read(0, &facts); /* without it a later process may be taken for this one */
  own.process.start_time = facts.start_time;
  even_status room = EVEN_NEW_ARRAY(&all, ranks);
  room = room == EVEN_OK ? EVEN_NEW_ARRAY(&counts, ranks) : room;
  for (size_t r = 0; r < ranks && room == EVEN_OK; r++) {
    counts[r] = sizeof own;
  }
  if (room == EVEN_OK) {
    status = share(optim, status, &own, all, counts);
  } else { /* nobody waits for what it cannot say */
    even_comm_revoke(optim->comm);
    status = room;
  }
  even_free(counts);
  even_free(all);
  return status;
}

/* What this rank has for itself. */
static even_status prepare(even_optim *optim, const even_optim_params *params, size_t *bytes) {
  EVEN_TRY(check_params(params));
  EVEN_TRY(even_optim_pieces_count(params, &optim->piece_count));
  EVEN_TRY(EVEN_NEW_ARRAY(&optim->places, params->parameter_count));
  EVEN_TRY(EVEN_NEW_ARRAY(&optim->factors, params->parameter_count));
  EVEN_TRY(EVEN_NEW_ARRAY(&optim->processes, (size_t)optim->ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&optim->parts, (size_t)optim->ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&optim->room, EVEN_OPTIM_PIECE));
  EVEN_TRY(lay_out(optim, params, bytes)); /* before the pieces: where there are too many, it says so */
  EVEN_TRY(EVEN_NEW_ARRAY(&optim->pieces, optim->piece_count));
  even_optim_pieces_place(params, optim->pieces);
  optim->parameter_count = params->parameter_count;
  return EVEN_OK;
}

even_status even_optim_open(const even_optim_params *params, even_comm *comm, even_optim **out) {
  even_optim *optim = NULL;
  even_optim_params own = {0};
  size_t bytes = 0;
  *out = NULL;
  if (comm != NULL && strcmp(even_comm_engine_name(comm), "shm") != 0) {
    return even_fail(EVEN_ERR_ARGUMENT,
                     "an optimizer's states in the memory of a group over \"%s\": its ranks have to "
                     "be on one host",
                     even_comm_engine_name(comm));
  }
  even_status status = EVEN_NEW(&optim);
  if (status != EVEN_OK) {
    if (comm != NULL) {
      even_comm_revoke(comm); /* nobody waits for this rank */
    }
    return status;
  }
  optim->memory.fd = -1;
  optim->ranks = comm == NULL ? 1 : even_comm_ranks(comm);
  optim->rank = comm == NULL ? 0 : even_comm_rank(comm);
  optim->comm = optim->ranks > 1 ? comm : NULL;
  status = EVEN_TAKE_PARAMS(even_optim_params, &own, params);
  status = status == EVEN_OK ? EVEN_CHECK_RESERVED(even_optim_params, &own) : status;
  optim->survives = own.survives && optim->comm != NULL;
  status = status == EVEN_OK ? prepare(optim, &own, &bytes) : status;
  if (optim->comm != NULL) { /* also to tell the others of an error here */
    status = open_shared(optim, status, bytes, status == EVEN_OK ? signature_of(&own) : 0);
  } else if (status == EVEN_OK) {
    status = even_shared_memory_create("evenstep-optim", bytes, &optim->memory);
  }
  if (status != EVEN_OK) {
    even_optim_close(optim);
    return status;
  }
  *out = optim;
  return EVEN_OK;
}

void even_optim_close(even_optim *optim) {
  if (optim == NULL) {
    return;
  }
  even_shared_memory_close(&optim->memory);
  even_free(optim->pieces);
  even_free(optim->parts);
  even_free(optim->room);
  even_free(optim->processes);
  even_free(optim->factors);
  even_free(optim->places);
  even_free(optim);
}

void *even_optim_memory(even_optim *optim) {
  return optim->memory.address;
}

size_t even_optim_bytes(const even_optim *optim) {
  return optim->memory.bytes;
}

void *even_optim_state(even_optim *optim, size_t parameter, int state) {
  if (parameter >= optim->parameter_count || state < 0) {
    return NULL;
  }
  const even_optim_place *of = &optim->places[parameter];
  if (state < of->states) {
    return even_optim_at(optim, of->state[state]);
  }
  return state == of->states && even_optim_is_short(of->dtype) ? even_optim_at(optim, of->values) : NULL;
}
