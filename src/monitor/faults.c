/* Faults by kind, as their events tell them. */
#include "monitor/faults.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static const struct {
  int event;
  const char *one;
  const char *many;
} kinds[EVEN_FAULT_COUNT] = {
#define FAULT_KIND(name, event, one, many) [EVEN_FAULT_##name] = {event, one, many},
    EVEN_FAULT_LIST(FAULT_KIND)
#undef FAULT_KIND
};

void even_faults_take(even_state_fault *faults, const even_state_event *event) {
  for (size_t kind = 0; kind < EVEN_FAULT_COUNT; kind++) {
    even_state_fault *fault = &faults[kind];
    if (kinds[kind].event != event->event) {
      continue;
    }
    if (event->value == 0) {
      fault->lasting -= fault->lasting > 0 ? 1 : 0;
      return;
    }
    if (event->value > 0) {
      fault->lasting++;
      (void)snprintf(fault->lasting_words, sizeof fault->lasting_words, "%s", event->words);
    }
    if (fault->count++ == 0) {
      fault->first_step = event->step;
    }
    fault->rank = event->rank;
    fault->step = event->step;
    (void)snprintf(fault->words, sizeof fault->words, "%s", event->words);
    return;
  }
}

const char *even_faults_name(int kind) {
  return even_state_event_name(kinds[kind].event);
}

void even_faults_restart(even_state_fault *faults) {
  for (size_t kind = 0; kind < EVEN_FAULT_COUNT; kind++) {
    faults[kind].lasting = 0;
  }
}

static bool lasts(const even_state *state, size_t kind) {
  return state->ended_ns == 0 && state->faults[kind].lasting > 0;
}

const char *even_faults_hang(const even_state *state) {
  return lasts(state, EVEN_FAULT_HANG) ? state->faults[EVEN_FAULT_HANG].lasting_words : NULL;
}

const char *even_faults_link(const even_state *state) {
  return lasts(state, EVEN_FAULT_LINK) ? state->faults[EVEN_FAULT_LINK].lasting_words : NULL;
}

const char *even_faults_lasting(const even_state *state) {
  for (size_t kind = 0; kind < EVEN_FAULT_COUNT; kind++) {
    if (lasts(state, kind)) {
      return state->faults[kind].lasting_words;
    }
  }
  return NULL;
}

void even_faults_lines(const even_state *state, even_text *out) {
  for (size_t kind = 0; kind < EVEN_FAULT_COUNT; kind++) {
    const even_state_fault *fault = &state->faults[kind];
    if (kind == EVEN_FAULT_STRAGGLER) { /* monitor/lagging.h has lines of its own */
      continue;
    }
    if (fault->count == 1) {
      even_text_format(out, "  1 %s, at step %" PRIu32 ": %s\n", kinds[kind].one, fault->step, fault->words);
    } else if (fault->count > 1) {
      even_text_format(out, "  %" PRIu64 " %s, the first at step %" PRIu32 "; the last, at step %" PRIu32 ": %s\n",
                       fault->count, kinds[kind].many, fault->first_step, fault->step, fault->words);
    }
  }
}

void even_faults_json(even_json *json, const even_state *state) {
  even_json_array(json, "faults");
  for (size_t kind = 0; kind < EVEN_FAULT_COUNT; kind++) {
    const even_state_fault *fault = &state->faults[kind];
    if (fault->count == 0) {
      continue;
    }
    even_json_object(json, NULL);
    even_json_string(json, "kind", even_faults_name((int)kind));
    even_json_unsigned(json, "count", fault->count);
    even_json_unsigned(json, "first_step", fault->first_step);
    even_json_bool(json, "lasts", lasts(state, kind));
    if (fault->rank < 0) {
      even_json_null(json, "rank");
    } else {
      even_json_integer(json, "rank", fault->rank);
    }
    even_json_unsigned(json, "step", fault->step);
    even_json_string(json, "words", fault->words);
    even_json_object_end(json);
  }
  even_json_array_end(json);
}
