/* Reads and shows plan.json. */
#include "cli/plan_file.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "base/json_reader.h"
#include "base/text.h"
#include "cli/units.h"
#include "os/file.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { LARGEST_BYTES = 64 << 20 };

/* A finite number that is not negative, of an object that may be NULL. */
static bool number(const json_t *object, const char *key, double *out) {
  const json_t *value = json_object_get(object, key);
  *out = json_number_value(value);
  return json_is_number(value) && isfinite(*out) && *out >= 0.0;
}

static bool whole(const json_t *object, const char *key, int64_t *out) {
  const json_t *value = json_object_get(object, key);
  *out = json_integer_value(value);
  return json_is_integer(value) && *out >= 0;
}

static bool read_rank(const json_t *object, even_plan_rank *out) {
  const char *device = json_string_value(json_object_get(object, "device"));
  (void)snprintf(out->device, sizeof out->device, "%s", device != NULL ? device : "?");
  if (!whole(object, "peak_memory_bytes", &out->memory_bytes)) {
    out->memory_bytes = 0; /* null: could not be measured */
  }
  if (!number(object, "predicted_seconds_of_one", &out->seconds_of_one)) {
    out->seconds_of_one = 0.0;
  }
  return whole(object, "share", &out->share) && whole(object, "share_equal", &out->share_equal) &&
         number(object, "predicted_seconds", &out->seconds) &&
         number(object, "predicted_seconds_equal", &out->seconds_equal);
}

/* Where steps are shorter without some ranks: which, and how long they take then. */
static bool read_without(const json_t *without, even_plan *out) {
  const json_t *ranks = json_object_get(without, "ranks");
  if (without == NULL) {
    return true;
  }
  for (size_t i = 0; i < json_array_size(ranks); i++) {
    const json_t *rank = json_array_get(ranks, i);
    if (!json_is_integer(rank) || json_integer_value(rank) < 0 || (size_t)json_integer_value(rank) >= out->ranks) {
      return false;
    }
    out->rank[json_integer_value(rank)].is_worse = true;
  }
  return json_array_size(ranks) > 0 && json_array_size(ranks) < out->ranks &&
         number(without, "step_seconds", &out->without_seconds);
}

static even_status read_plan(const char *path, const json_t *root, even_plan *out) {
  const char *format = json_string_value(json_object_get(root, "format"));
  const json_t *ranks = json_object_get(root, "ranks");
  const json_t *predicted = json_object_get(root, "predicted");
  if (format == NULL || strcmp(format, "evenstep-plan-1") != 0) {
    return even_fail(EVEN_ERR_INPUT, "%s is not a plan of this version (\"format\": \"evenstep-plan-1\")", path);
  }
  if (!whole(root, "batch", &out->batch) || out->batch == 0 || json_array_size(ranks) == 0) {
    return even_fail(EVEN_ERR_INPUT, "%s: the plan has no batch or no ranks", path);
  }
  if (!number(json_object_get(predicted, "balanced"), "step_seconds", &out->balanced_seconds) ||
      !number(json_object_get(predicted, "equal"), "step_seconds", &out->equal_seconds) ||
      !number(predicted, "bound_samples_per_second", &out->bound_samples_per_second)) {
    return even_fail(EVEN_ERR_INPUT, "%s: the plan predicts no step times", path);
  }
  if (!number(predicted, "waits_seconds", &out->waits_seconds)) {
    out->waits_seconds = 0.0; /* none was told, or a plan of before there were any */
  }
  EVEN_TRY(EVEN_NEW_ARRAY(&out->rank, json_array_size(ranks)));
  for (; out->ranks < json_array_size(ranks); out->ranks++) {
    if (!read_rank(json_array_get(ranks, out->ranks), &out->rank[out->ranks])) {
      return even_fail(EVEN_ERR_INPUT, "%s: what the plan says of rank %zu is not complete", path, out->ranks);
    }
  }
  if (!read_without(json_object_get(predicted, "without"), out)) {
    return even_fail(EVEN_ERR_INPUT, "%s: what the plan says of ranks to leave out is not complete", path);
  }
  return EVEN_OK;
}

even_status even_plan_parse(const char *origin, const char *text, size_t bytes, even_plan *out) {
  json_t *root = NULL;
  memset(out, 0, sizeof *out);
  EVEN_TRY(even_json_parse(origin, text, bytes, &root));
  even_status status = read_plan(origin, root, out);
  json_decref(root);
  return status;
}

even_status even_plan_read(const char *path, even_plan *out) {
  even_text text = EVEN_TEXT_EMPTY;
  memset(out, 0, sizeof *out);
  even_status status = even_file_read(path, LARGEST_BYTES, &text);
  if (status == EVEN_OK) {
    status = even_plan_parse(path, even_text_string(&text), text.length, out);
  }
  even_text_free(&text);
  return status;
}

void even_plan_free(even_plan *plan) {
  even_free(plan->rank);
  memset(plan, 0, sizeof *plan);
}

/* What the others need for the whole batch. */
static double longest(const even_plan *plan) {
  double seconds = 0.0;
  for (size_t i = 0; i < plan->ranks; i++) {
    const even_plan_rank *r = &plan->rank[i];
    seconds = r->share > 0 && r->seconds > seconds ? r->seconds : seconds;
  }
  return seconds;
}

static bool is_left_out(const even_plan *plan, size_t rank) {
  return plan->rank[rank].share == 0 && plan->rank[rank].seconds_of_one > longest(plan);
}

static bool is_worse(const even_plan *plan, size_t rank) {
  return plan->rank[rank].is_worse;
}

/* The devices of all others, as --devices takes them; false where two have one name. */
static bool others_named(const even_plan *plan, bool (*leaves)(const even_plan *, size_t), even_text *out) {
  for (size_t i = 0; i < plan->ranks; i++) {
    for (size_t k = 0; k < i; k++) {
      if (strcmp(plan->rank[i].device, plan->rank[k].device) == 0) {
        return false;
      }
    }
    if (!leaves(plan, i)) {
      even_text_format(out, "%s%s", out->length > 0 ? "," : "", plan->rank[i].device);
    }
  }
  return even_text_status(out) == EVEN_OK;
}

static void print_left_out(const even_plan *plan, bool one_host) {
  even_text devices = EVEN_TEXT_EMPTY;
  bool named = one_host && plan->without_seconds <= 0.0 && others_named(plan, is_left_out, &devices);
  for (size_t i = 0; i < plan->ranks; i++) {
    const even_plan_rank *r = &plan->rank[i];
    if (is_left_out(plan, i)) {
      (void)printf("\nrank %zu (%s) gets no samples: one would take %.3g ms where the others need %.3g for all", i,
                   r->device, r->seconds_of_one * 1e3, longest(plan) * 1e3);
      if (named) {
        (void)printf("; --devices %s leaves it out", even_text_string(&devices));
      }
      (void)printf("\n");
    }
  }
  even_text_free(&devices);
}

/* Whether the first `left` ranks, which -n starts, are those that stay. */
static bool are_first(const even_plan *plan, size_t left) {
  for (size_t i = 0; i < left; i++) {
    if (is_worse(plan, i)) {
      return false;
    }
  }
  return true;
}

/* "rank 1 (cpu:0)", "ranks 1 (cpu:0), 2 (cpu:1)" */
static size_t add_worse(const even_plan *plan, even_text *out) {
  size_t count = 0;
  for (size_t i = 0; i < plan->ranks; i++) {
    count += is_worse(plan, i);
  }
  even_text_format(out, "rank%s", count > 1 ? "s" : "");
  for (size_t i = 0, told = 0; i < plan->ranks; i++) {
    if (is_worse(plan, i)) {
      even_text_format(out, "%s %zu (%s)", told++ > 0 ? "," : "", i, plan->rank[i].device);
    }
  }
  return count;
}

bool even_plan_leaves_out(const even_plan *plan, even_text *ranks, even_text *devices) {
  if (plan->without_seconds <= 0.0 || !others_named(plan, is_worse, devices)) {
    return false;
  }
  (void)add_worse(plan, ranks);
  return even_text_status(ranks) == EVEN_OK;
}

static void print_without(const even_plan *plan, bool one_host) {
  even_text ranks = EVEN_TEXT_EMPTY;
  even_text devices = EVEN_TEXT_EMPTY;
  if (plan->without_seconds <= 0.0) {
    return;
  }
  size_t left = plan->ranks - add_worse(plan, &ranks);
  (void)printf("\nWithout %s a step takes %.3g ms instead of %.3g", even_text_string(&ranks),
               plan->without_seconds * 1e3, plan->balanced_seconds * 1e3);
  if (left == 1) {
    (void)printf(", for one rank alone exchanges nothing");
  }
  if (one_host && others_named(plan, is_worse, &devices)) {
    (void)printf("; --devices %s starts it so", even_text_string(&devices));
  } else if (one_host && are_first(plan, left)) {
    (void)printf("; -n %zu starts so many", left);
  }
  (void)printf("\n");
  even_text_free(&ranks);
  even_text_free(&devices);
}

void even_plan_print(const even_plan *plan, bool one_host) {
  char bytes[32];
  double batch = (double)plan->batch;
  (void)printf("%4s  %-9s %7s %9s %11s %11s %7s %9s\n", "RANK", "DEVICE", "SHARE", "BUSY ms", "SAMPLES/s", "PEAK MEM",
               "EQUAL", "BUSY ms");
  for (size_t i = 0; i < plan->ranks; i++) {
    const even_plan_rank *r = &plan->rank[i];
    (void)printf("%4zu  %-9s %7" PRId64 " %9.1f %11.1f %11s %7" PRId64 " %9.1f\n", i, r->device, r->share,
                 r->seconds * 1e3, r->seconds > 0.0 ? (double)r->share / r->seconds : 0.0,
                 r->memory_bytes > 0 ? even_cli_bytes((uint64_t)r->memory_bytes, bytes, sizeof bytes) : "-",
                 r->share_equal, r->seconds_equal * 1e3);
  }
  (void)printf("\nbalanced  %8.1f ms a step, %.1f samples/s\n", plan->balanced_seconds * 1e3,
               batch / plan->balanced_seconds);
  (void)printf("equal     %8.1f ms a step, %.1f samples/s\n", plan->equal_seconds * 1e3, batch / plan->equal_seconds);
  (void)printf("bound              %.1f samples/s: the ranks' speeds added up\n", plan->bound_samples_per_second);
  double gain = plan->equal_seconds / plan->balanced_seconds;
  if (gain < 1.01) {
    (void)printf("\nThe equal split is as good as any here.\n");
  } else {
    (void)printf("\nBalancing makes a step of %" PRId64 " samples %.2f times faster than the equal split.\n",
                 plan->batch, gain);
  }
  if (plan->waits_seconds > 0.0) {
    (void)printf(
        "\nRanks wait for one another within steps, as BatchNorm's do: %.3g ms of a balanced one. A training finds "
        "by trials the split with which a step is shortest.\n",
        plan->waits_seconds * 1e3);
  }
  print_left_out(plan, one_host);
  print_without(plan, one_host);
}
