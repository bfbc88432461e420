/* What is told of those that were left after a rank was lost under `evenstep chaos --recovery`, of killed agents, of
 * ranks without memory. */
#include "base/alloc.h"
#include "base/fail.h"
#include "cli/chaos.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static double seconds_until(const even_chaos_done *done, uint64_t at_ns) {
  return at_ns > done->at_ns ? (double)(at_ns - done->at_ns) * 1e-9 : 0;
}

void even_chaos_outcome_json(const even_chaos_done *done, even_json *json) {
  static const char *const names[] = {NULL, "went_on", "started_again"};
  static const char *const tended[] = {NULL, "outlasted", "begun_anew", "replaced", "host_lost", "resumed_by_chaos"};
  even_json_string(json, "others", done->judged && done->trained ? names[done->outcome] : NULL);
  even_json_integer(json, "again_ns", (int64_t)done->again_ns);
  even_json_integer(json, "stepped_ns", (int64_t)done->stepped_ns);
  even_json_integer(json, "joined_ns", (int64_t)done->joined_ns);
  even_json_string(json, "why", done->why[0] == '\0' ? NULL : done->why);
  even_json_string(json, "agent", tended[done->tended]);
  if (done->lack == EVEN_CHAOS_LACK_UNKNOWN) {
    even_json_null(json, "hurt");
  } else {
    even_json_bool(json, "hurt", done->lack == EVEN_CHAOS_LACK_HURT);
  }
}

void even_chaos_outcome_words(const even_chaos_done *done, char *out, size_t bytes) {
  out[0] = '\0';
  if (!done->judged || !done->trained) {
    return;
  }
  if (done->outcome == EVEN_SURVIVAL_STARTED_AGAIN) {
    (void)snprintf(out, bytes, "; all began again%s%s", done->why[0] == '\0' ? "" : ": ", done->why);
  } else if (done->outcome == EVEN_SURVIVAL_WENT_ON) {
    int length =
        snprintf(out, bytes, "; the others made the next step after %.2f s", seconds_until(done, done->stepped_ns));
    if (done->joined_ns != 0 && length > 0 && (size_t)length < bytes) {
      (void)snprintf(out + length, bytes - (size_t)length, ", with another in its place after %.2f s",
                     seconds_until(done, done->joined_ns));
    }
  }
}

static int smaller_first(const void *a, const void *b) {
  double x = *(const double *)a;
  double y = *(const double *)b;
  return (x > y) - (x < y);
}

typedef enum part { AGAIN, STEPPED, JOINED, PARTS } part;

static uint64_t time_of(const even_chaos_done *done, part which) {
  return which == AGAIN ? done->again_ns : which == STEPPED ? done->stepped_ns : done->joined_ns;
}

static void add_times(const even_chaos_done *done, size_t count, part which, double *room, even_text *out) {
  static const char *const words[PARTS] = {"to the others computing again", "to their next step",
                                           "to the first step of another in its place"};
  size_t seen = 0;
  for (size_t i = 0; i < count; i++) {
    if (done[i].trained && done[i].outcome == EVEN_SURVIVAL_WENT_ON && time_of(&done[i], which) != 0) {
      room[seen++] = seconds_until(&done[i], time_of(&done[i], which));
    }
  }
  if (seen > 0) {
    qsort(room, seen, sizeof *room, smaller_first);
    even_text_format(out, "; %s %.2f s (median of %zu; %.2f at most)", words[which], room[seen / 2], seen,
                     room[seen - 1]);
  }
}

even_status even_chaos_outcome_sum(const even_chaos_done *done, size_t count, even_text *out) {
  double *room = NULL;
  size_t lost = 0;
  size_t survived = 0;
  for (size_t i = 0; i < count; i++) {
    bool known = done[i].trained && done[i].outcome != EVEN_SURVIVAL_UNKNOWN;
    lost += known ? 1 : 0;
    survived += known && done[i].outcome == EVEN_SURVIVAL_WENT_ON ? 1 : 0;
  }
  EVEN_TRY(EVEN_NEW_ARRAY(&room, count));
  even_text_format(out, "the others kept their processes after %zu of %zu faults of ranks that trained", survived,
                   lost);
  for (int which = 0; which < PARTS; which++) {
    add_times(done, count, (part)which, room, out);
  }
  even_free(room);
  return even_text_status(out);
}

void even_chaos_tended_sum(const even_chaos_done *done, size_t count, even_text *out) {
  static const char *const words[] = {[EVEN_CHAOS_OUTLASTED] = "outlasted by their ranks",
                                      [EVEN_CHAOS_BEGUN_ANEW] = "followed by another one and a new attempt",
                                      [EVEN_CHAOS_REPLACED] = "replaced by another host's",
                                      [EVEN_CHAOS_HOST_LOST] = "with their hosts' ranks, and the job went on",
                                      [EVEN_CHAOS_RESUMED_BY_US] = "with the first process: chaos resumed the job"};
  enum { WAYS = sizeof words / sizeof words[0] };
  size_t agents[WAYS] = {0};
  size_t lacks[EVEN_CHAOS_LACK_BORNE + 1] = {0};
  const char *before = "agents killed: ";
  for (size_t i = 0; i < count; i++) {
    agents[done[i].tended]++;
    lacks[done[i].lack]++;
  }
  for (size_t way = EVEN_CHAOS_OUTLASTED; way < WAYS; way++) {
    if (agents[way] > 0) {
      even_text_format(out, "%s%zu %s", before, agents[way], words[way]);
      before = "; ";
    }
  }
  even_text_add(out, out->length > 0 ? "\n" : "");
  if (lacks[EVEN_CHAOS_LACK_BORNE] > 0) {
    even_text_format(out, "out-of-memory hurt %zu of %zu ranks: the others needed none, or did without\n",
                     lacks[EVEN_CHAOS_LACK_HURT], lacks[EVEN_CHAOS_LACK_HURT] + lacks[EVEN_CHAOS_LACK_BORNE]);
  }
}
