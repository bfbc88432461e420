/* What the made-up NCCL's operations do on a stream: ranks meet, give, take, and exchange messages. */
#include "comm/fake_nccl.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- types and operations ---- */

size_t fake_size_of(int type) {
  static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return type >= 0 && type <= FLOAT8_E5M2 ? sizes[type] : 0;
}

static double half_value(uint16_t half) {
  int exponent = (half >> 10) & 31;
  double fraction = half & 1023;
  double magnitude = exponent == 0 ? ldexp(fraction, -24) : ldexp(1024 + fraction, exponent - 25);
  return half & 0x8000 ? -magnitude : magnitude;
}

static double e4m3_value(uint8_t bits) {
  int exponent = (bits >> 3) & 15;
  double fraction = bits & 7;
  double magnitude = exponent == 0 ? ldexp(fraction, -9) : ldexp(8 + fraction, exponent - 10);
  return bits & 0x80 ? -magnitude : magnitude;
}

/* The largest of a floating type of few bits that is not above the value; `step` is its exponent's highest bit. */
static uint32_t narrowed(double value, uint32_t step, uint32_t least_wrong, double (*value_of)(uint32_t bits)) {
  uint32_t bits = 0;
  for (uint32_t next = step; next > 0; next /= 2) {
    bits += bits + next < least_wrong && value_of(bits + next) <= fabs(value) ? next : 0;
  }
  return bits;
}

static double of_half(uint32_t bits) {
  return half_value((uint16_t)bits);
}

static double of_e4m3(uint32_t bits) {
  return e4m3_value((uint8_t)bits);
}

double fake_load(int type, const unsigned char *at) {
  int8_t i8;
  int32_t i32;
  int64_t i64;
  uint16_t half;
  float f32;
  double f64;
  switch (type) {
    case INT8:
      memcpy(&i8, at, 1);
      return i8;
    case UINT8:
      return *at;
    case INT32:
    case UINT32: /* tests have none that is negative */
      memcpy(&i32, at, 4);
      return i32;
    case INT64:
    case UINT64:
      memcpy(&i64, at, 8);
      return (double)i64;
    case FLOAT32:
      memcpy(&f32, at, 4);
      return (double)f32;
    case FLOAT64:
      memcpy(&f64, at, 8);
      return f64;
    case FLOAT8_E4M3:
      return e4m3_value(*at);
    case FLOAT8_E5M2: /* half of a half */
      return half_value((uint16_t)(*at << 8));
    default:
      memcpy(&half, at, 2);
      if (type == FLOAT16) {
        return half_value(half);
      }
      uint32_t bits = (uint32_t)half << 16;
      memcpy(&f32, &bits, 4);
      return (double)f32;
  }
}

/* Only for values that the type holds exactly: tests choose such. */
static void store(int type, double value, unsigned char *at) {
  int8_t i8 = 0;
  uint8_t u8 = 0;
  int32_t i32 = 0;
  int64_t i64 = 0;
  uint32_t bits = 0;
  float f32 = (float)value;
  switch (type) {
    case INT8:
      i8 = (int8_t)value;
      memcpy(at, &i8, 1);
      return;
    case UINT8:
      u8 = (uint8_t)value;
      memcpy(at, &u8, 1);
      return;
    case INT32:
    case UINT32: /* tests have none that is negative */
      i32 = (int32_t)value;
      memcpy(at, &i32, 4);
      return;
    case INT64:
    case UINT64:
      i64 = (int64_t)value;
      memcpy(at, &i64, 8);
      return;
    case FLOAT32:
      memcpy(at, &f32, 4);
      return;
    case FLOAT64:
      memcpy(at, &value, 8);
      return;
    case FLOAT16:
    case FLOAT8_E5M2:
      bits = narrowed(value, 0x4000, 0x7c00, of_half) | (value < 0 ? 0x8000 : 0);
      bits >>= type == FLOAT16 ? 0 : 8;
      memcpy(at, &bits, fake_size_of(type));
      return;
    case FLOAT8_E4M3:
      *at = (unsigned char)(narrowed(value, 0x40, 0x7f, of_e4m3) | (value < 0 ? 0x80 : 0));
      return;
    default:
      memcpy(&bits, &f32, 4);
      bits >>= 16;
      memcpy(at, &bits, 2);
  }
}

static double combine(int op, double a, double b) {
  switch (op) {
    case PROD:
      return a * b;
    case MAX:
      return a > b ? a : b;
    case MIN:
      return a < b ? a : b;
    default:
      return a + b;
  }
}

/* ---- what streams run ---- */

static bool all_reached(const fake_world *world, int ranks, unsigned long barrier) {
  for (int rank = 0; rank < ranks; rank++) {
    if (atomic_load(&world->reached[rank]) < barrier) {
      return false;
    }
  }
  return true;
}

/* Everybody's barrier; false: this rank was aborted. */
static bool meet(ncclComm *comm) {
  fake_world *world = comm->place.world;
  unsigned long barrier = atomic_fetch_add(&world->reached[comm->rank], 1) + 1;
  fake_world_change(world);
  for (;;) {
    uint32_t seen = atomic_load(&world->changed);
    if (all_reached(world, comm->ranks, barrier)) {
      return true;
    }
    if (atomic_load(&comm->aborted)) {
      return false;
    }
    fake_world_wait(world, seen);
  }
}

static size_t parts_of(const operation *op, bool sent) {
  size_t ranks = (size_t)op->comm->ranks;
  return op->count * (op->kind == REDUCE_SCATTER && sent ? ranks : 1);
}

/* ---- what lies where ---- */

static size_t read_bytes(const operation *op) {
  bool reads = op->kind != RECEIVE && (op->kind != BROADCAST || op->peer == op->comm->rank);
  return reads ? parts_of(op, true) * fake_size_of(op->type) : 0;
}

static size_t written_bytes(const operation *op) {
  bool writes = op->kind != SEND && (op->kind != REDUCE || op->peer == op->comm->rank);
  size_t parts = op->kind == ALL_GATHER ? (size_t)op->comm->ranks : 1;
  return writes ? parts * op->count * fake_size_of(op->type) : 0;
}

static bool is_in_place(const operation *op) {
  uintptr_t input = (uintptr_t)op->input;
  uintptr_t output = (uintptr_t)op->output;
  size_t before = (size_t)op->comm->rank * op->count * fake_size_of(op->type);
  return op->kind == ALL_GATHER       ? input == output + before
         : op->kind == REDUCE_SCATTER ? output == input + before
                                      : input == output;
}

void fake_batch_check(const batch *all) {
  for (const operation *in = all->first; in != NULL; in = in->next) {
    for (const operation *out = all->first; out != NULL; out = out->next) {
      uintptr_t input = (uintptr_t)in->input;
      uintptr_t output = (uintptr_t)out->output;
      bool apart = input + read_bytes(in) <= output || output + written_bytes(out) <= input;
      if (read_bytes(in) > 0 && written_bytes(out) > 0 && !apart && !(in == out && is_in_place(in))) {
        fake_violate("an input lies where something is written, and is not in place");
      }
    }
  }
}

/* ---- giving and taking ---- */

static void give(const operation *op) {
  size_t count = parts_of(op, true);
  size_t size = fake_size_of(op->type);
  unsigned char *own = malloc(count * size + 1);
  if (own == NULL) {
    abort();
  }
  memcpy(own, op->input, count * size);
  for (size_t i = 0; op->scaled && i < count; i++) {
    store(op->type, fake_load(op->type, own + i * size) * op->factor, own + i * size);
  }
  fake_place_write(&op->comm->place, op->comm->rank, own, count * size);
  free(own);
}

/* count reduced elements from element `from` on */
static void reduce_into(const operation *op, void *output, size_t from) {
  size_t size = fake_size_of(op->type);
  size_t bytes = op->count * size;
  unsigned char *part = malloc(bytes + 1);
  double *sum = calloc(op->count + 1, sizeof *sum);
  if (part == NULL || sum == NULL) {
    abort();
  }
  for (int rank = 0; rank < op->comm->ranks; rank++) {
    fake_place_read(&op->comm->place, rank, part, bytes, from * size);
    for (size_t i = 0; i < op->count; i++) {
      double value = fake_load(op->type, part + i * size);
      sum[i] = rank == 0 ? value : combine(op->op, sum[i], value);
    }
  }
  for (size_t i = 0; i < op->count; i++) {
    store(op->type, op->op == AVG ? sum[i] / op->comm->ranks : sum[i], (unsigned char *)output + i * size);
  }
  free(part);
  free(sum);
}

static void take(const operation *op) {
  ncclComm *comm = op->comm;
  size_t bytes = op->count * fake_size_of(op->type);
  switch (op->kind) {
    case ALL_REDUCE:
      reduce_into(op, op->output, 0);
      return;
    case REDUCE:
      if (comm->rank == op->peer) {
        reduce_into(op, op->output, 0);
      }
      return;
    case REDUCE_SCATTER:
      reduce_into(op, op->output, (size_t)comm->rank * op->count);
      return;
    case ALL_GATHER:
      for (int rank = 0; rank < comm->ranks; rank++) {
        fake_place_read(&comm->place, rank, (char *)op->output + (size_t)rank * bytes, bytes, 0);
      }
      return;
    default:
      fake_place_read(&comm->place, op->peer, op->output, bytes, 0);
  }
}

static bool same_call(const operation *op) {
  fake_world *world = op->comm->place.world;
  bool same = true;
  for (int rank = 1; rank < op->comm->ranks; rank++) {
    same = same && atomic_load(&world->signature[rank]) == atomic_load(&world->signature[0]);
  }
  if (!same) {
    fake_violate("ranks made different collectives");
    atomic_store(&op->comm->failed, INVALID_USAGE);
  }
  return same;
}

static bool collective(operation *op) {
  fake_world *world = op->comm->place.world;
  unsigned long root = op->kind == REDUCE || op->kind == BROADCAST ? (unsigned long)op->peer : 0;
  atomic_store(&world->signature[op->comm->rank], (unsigned long)op->kind | (unsigned long)op->type << 4 |
                                                      (unsigned long)op->op << 8 | root << 12 | op->count << 20);
  if (op->kind != BROADCAST || op->peer == op->comm->rank) {
    give(op);
  }
  if (!meet(op->comm)) {
    return false;
  }
  if (same_call(op)) {
    take(op);
  }
  return meet(op->comm);
}

/* One message, if it can go now. */
static bool move(operation *op) {
  fake_world *world = op->comm->place.world;
  int from = op->kind == SEND ? op->comm->rank : op->peer;
  int to = op->kind == SEND ? op->peer : op->comm->rank;
  int region = FAKE_RANKS + from * FAKE_RANKS + to;
  size_t bytes = op->count * fake_size_of(op->type);
  bool full = atomic_load(&world->sent[from][to]) > atomic_load(&world->received[from][to]);
  if (full == (op->kind == SEND)) {
    return false;
  }
  if (op->kind == SEND) {
    fake_place_write(&op->comm->place, region, op->input, bytes);
    atomic_store(&world->message[from][to], bytes);
    atomic_fetch_add(&world->sent[from][to], 1);
  } else {
    size_t given = atomic_load(&world->message[from][to]);
    if (given != bytes) {
      fake_violate("rank %d receives %zu bytes from %d, which sent %zu", to, bytes, from, given);
      bytes = bytes < given ? bytes : given;
    }
    fake_place_read(&op->comm->place, region, op->output, bytes, 0);
    atomic_fetch_add(&world->received[from][to], 1);
  }
  fake_world_change(world);
  return true;
}

/* Messages of one pair and direction keep their order; any other may overtake. */
static bool is_next(const batch *all, const operation *op) {
  for (const operation *before = all->first; before != op; before = before->next) {
    if (before->kind == op->kind && before->peer == op->peer && !before->done) {
      return false;
    }
  }
  return true;
}

static void messages(batch *all) {
  fake_world *world = all->comm->place.world;
  for (;;) {
    uint32_t seen = atomic_load(&world->changed);
    bool left = false;
    bool moved = false;
    for (operation *op = all->first; op != NULL; op = op->next) {
      if (!op->done && is_next(all, op) && move(op)) {
        op->done = moved = true;
      }
      left = left || !op->done;
    }
    if (!left || atomic_load(&all->comm->aborted)) {
      break;
    }
    if (!moved) {
      fake_world_wait(world, seen);
    }
  }
}

/* Stands still while the test wants it, until an abort. */
static void stand(ncclComm *comm) {
  fake_world *world = comm->place.world;
  while (fake_is_hanging() && !atomic_load(&comm->aborted)) {
    fake_world_wait(world, atomic_load(&world->changed));
  }
}

void fake_batch_free(batch *all) {
  while (all->first != NULL) {
    operation *op = all->first;
    all->first = op->next;
    free(op);
  }
  free(all);
}

void fake_batch_run(void *argument) {
  batch *all = argument;
  ncclComm *comm = all->comm;
  stand(comm);
  for (operation *op = all->first; op != NULL; op = op->next) {
    if (op->kind < SEND && !atomic_load(&comm->aborted)) {
      op->done = collective(op);
    }
    op->done = op->done || op->kind < SEND;
  }
  if (!atomic_load(&comm->aborted)) {
    messages(all);
  }
  fake_batch_free(all);
  atomic_fetch_sub(&comm->outstanding, 1);
}
