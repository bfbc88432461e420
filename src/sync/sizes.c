/* Sizes of buckets by measurement: when a round's exchange would end with each, by a model of its pipeline. */
#include "base/fail.h"
#include "base/params.h"
#include "sync/layout.h"

#include <evenstep/sync.h>
#include <math.h>

/* What is tried. Larger buckets would be one call after backward; smaller ones cost more calls than they hide. */
static const size_t caps[] = {(size_t)256 << 10, (size_t)512 << 10, (size_t)1 << 20,  (size_t)2 << 20,
                              (size_t)4 << 20,   (size_t)8 << 20,   (size_t)16 << 20, (size_t)32 << 20};
static const size_t first_caps[] = {(size_t)64 << 10, (size_t)256 << 10, (size_t)1 << 20, (size_t)4 << 20};

/* By so much of the exchange an end has to be sooner, so that what makes no difference changes nothing. */
#define WORTH 1e-3

static even_status check(const even_sync_params *params, const even_sync_course *course) {
  if (!isfinite(course->end_seconds)) {
    return even_fail(EVEN_ERR_ARGUMENT, "a backward that ends after %g seconds", course->end_seconds);
  }
  for (size_t i = 0; i < params->parameter_count; i++) {
    if (!isfinite(course->ready_seconds[i])) {
      return even_fail(EVEN_ERR_ARGUMENT, "the gradient of parameter %zu comes after %g seconds", i,
                       course->ready_seconds[i]);
    }
  }
  return EVEN_OK;
}

static bool cost_of(const even_sync_course *course, const even_sync_layout *layout, size_t bucket, double *seconds) {
  const even_sync_span *span = &layout->buckets[bucket];
  bool narrow = layout->wire != EVEN_F32 && span->dtype == EVEN_F32;
  const even_comm_cost_key key = {.collective = "all_reduce",
                                  .shape = course->shape,
                                  .engine = course->engine,
                                  .way = "call",
                                  .bytes = narrow ? span->bytes / 2 : span->bytes};
  *seconds = 0;
  return span->bytes == 0 || even_comm_costs_find(course->costs, &key, seconds);
}

/* The buckets go one after the other, each once all its gradients are there. */
static bool end_of(const even_sync_course *course, const even_sync_params *params, const even_sync_layout *layout,
                   double *end) {
  size_t at = 0;
  double now = -INFINITY;
  for (size_t b = 0; b < layout->bucket_count; b++) {
    double seconds = 0;
    for (size_t member = 0; member < layout->buckets[b].members; member++) {
      size_t index = layout->order[at++];
      now = fmax(now, params->parameters[index].late != 0 ? course->end_seconds : course->ready_seconds[index]);
    }
    if (!cost_of(course, layout, b, &seconds)) {
      return false;
    }
    now += seconds;
  }
  *end = fmax(now, course->end_seconds);
  return true;
}

static even_status predict(const even_sync_params *params, const even_sync_course *course, double *end_seconds) {
  even_sync_layout layout;
  *end_seconds = 0;
  EVEN_TRY(even_sync_layout_make(params, &layout));
  even_status status = check(params, course);
  if (status == EVEN_OK && !end_of(course, params, &layout, end_seconds)) {
    status = even_fail(EVEN_ERR_NOT_FOUND, "what an all_reduce costs on engine %s is not known of %s", course->engine,
                       course->shape);
  }
  even_sync_layout_free(&layout);
  return status;
}

even_status even_sync_predict(const even_sync_params *params, const even_sync_course *course, double *end_seconds) {
  even_sync_params own;
  even_sync_course measured;
  *end_seconds = 0;
  EVEN_TRY(EVEN_TAKE_PARAMS(even_sync_params, &own, params));
  EVEN_TRY(EVEN_TAKE_PARAMS(even_sync_course, &measured, course));
  return predict(&own, &measured, end_seconds);
}

/* Whether such buckets have room. */
static even_status fits(const even_sync_params *params, size_t arena_bytes, bool *out) {
  size_t needed = 0;
  EVEN_TRY(even_sync_arena_bytes(params, &needed));
  *out = arena_bytes == 0 || needed <= arena_bytes;
  return EVEN_OK;
}

even_status even_sync_choose_sizes(const even_sync_params *params, const even_sync_course *course,
                                   even_sync_sizes *out) {
  even_sync_params tried;
  even_sync_course measured;
  *out = (even_sync_sizes){0};
  EVEN_TRY(EVEN_TAKE_PARAMS(even_sync_params, &tried, params));
  EVEN_TRY(EVEN_TAKE_PARAMS(even_sync_course, &measured, course));
  *out = (even_sync_sizes){.bucket_bytes = tried.bucket_bytes, .first_bucket_bytes = tried.first_bucket_bytes};
  EVEN_TRY(predict(&tried, &measured, &out->before_seconds));
  out->seconds = out->before_seconds;
  for (size_t c = 0; c < sizeof caps / sizeof caps[0]; c++) {
    for (size_t f = 0; f < sizeof first_caps / sizeof first_caps[0] && first_caps[f] <= caps[c]; f++) {
      double end = 0;
      bool room = false;
      tried.bucket_bytes = caps[c];
      tried.first_bucket_bytes = first_caps[f];
      EVEN_TRY(fits(&tried, measured.arena_bytes, &room));
      if (!room) {
        continue;
      }
      EVEN_TRY(predict(&tried, &measured, &end));
      if (end < out->seconds - WORTH * fabs(out->seconds)) {
        out->bucket_bytes = caps[c];
        out->first_bucket_bytes = first_caps[f];
        out->seconds = end;
      }
    }
  }
  return EVEN_OK;
}
