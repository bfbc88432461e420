/* /metrics by the rules of OpenMetrics 1.0 that a scraper holds to: each family declared once and in one piece, names
 * and values that parse, labels escaped, one end. https://prometheus.io/docs/specs/om/open_metrics_spec/ */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "monitor/metrics.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_FAMILIES = 64, MOST_SAMPLES = 512, MOST_LABELS = 8 };

typedef struct family {
  char name[96];
  char type[16];
  char unit[16];
  int types;
  int helps;
  int units;
  int samples;
} family;

typedef struct exposition {
  family families[MOST_FAMILIES];
  int count;
  char samples[MOST_SAMPLES][256]; /* name{labels} */
  double values[MOST_SAMPLES];
  int sample_count;
  bool ended;
} exposition;

static bool name_at(const char **at, char *out, size_t room) {
  size_t length = 0;
  while (isalnum((unsigned char)(*at)[length]) || (*at)[length] == '_') {
    length++;
  }
  if (length == 0 || length >= room || isdigit((unsigned char)**at)) {
    return false;
  }
  memcpy(out, *at, length);
  out[length] = '\0';
  *at += length;
  return true;
}

/* {name="value",…}: in a value, backslash, quote and newline stand escaped and nothing else does. */
static void labels(const char **at) {
  char seen[MOST_LABELS][64];
  int count = 0;
  assert_int_equal(*(*at)++, '{');
  for (;;) {
    assert_true(count < MOST_LABELS && name_at(at, seen[count], sizeof seen[count]));
    for (int i = 0; i < count; i++) {
      assert_string_not_equal(seen[i], seen[count]);
    }
    count++;
    assert_int_equal(*(*at)++, '=');
    assert_int_equal(*(*at)++, '"');
    for (; **at != '"'; (*at)++) {
      assert_true(**at != '\0' && **at != '\n');
      if (**at == '\\') {
        (*at)++;
        assert_non_null(strchr("\\\"n", **at));
        assert_true(**at != '\0');
      }
    }
    (*at)++;
    if (*(*at)++ == '}') {
      return;
    }
    assert_int_equal((*at)[-1], ',');
  }
}

static family *declared(exposition *all, const char *name) {
  if (all->count > 0 && strcmp(all->families[all->count - 1].name, name) == 0) {
    return &all->families[all->count - 1];
  }
  for (int i = 0; i < all->count; i++) { /* a family is one piece */
    assert_string_not_equal(all->families[i].name, name);
  }
  assert_true(all->count < MOST_FAMILIES);
  family *made = &all->families[all->count++];
  (void)snprintf(made->name, sizeof made->name, "%s", name);
  return made;
}

/* "# TYPE name word", "# HELP name words", "# UNIT name word", "# EOF" */
static void described(exposition *all, const char *line) {
  char name[96];
  const char *at = line + 7;
  if (strcmp(line, "# EOF") == 0) {
    all->ended = true;
    return;
  }
  assert_true(strlen(line) > 7 && line[6] == ' ' && name_at(&at, name, sizeof name) && *at == ' ' && at[1] != '\0');
  family *of = declared(all, name);
  assert_int_equal(of->samples, 0); /* before its samples */
  if (strncmp(line, "# TYPE ", 7) == 0) {
    of->types++;
    (void)snprintf(of->type, sizeof of->type, "%s", at + 1);
  } else if (strncmp(line, "# HELP ", 7) == 0) {
    of->helps++;
    assert_null(strchr(at, '\\'));
  } else {
    assert_int_equal(strncmp(line, "# UNIT ", 7), 0);
    of->units++;
    (void)snprintf(of->unit, sizeof of->unit, "%s", at + 1);
  }
}

static void sampled(exposition *all, const char *line) {
  char name[96];
  char expected[128];
  char *end = NULL;
  const char *at = line;
  assert_true(all->count > 0 && name_at(&at, name, sizeof name));
  family *of = &all->families[all->count - 1];
  const char *suffix = strcmp(of->type, "counter") == 0 ? "_total" : strcmp(of->type, "info") == 0 ? "_info" : "";
  (void)snprintf(expected, sizeof expected, "%s%s", of->name, suffix);
  assert_string_equal(name, expected);
  if (*at == '{') {
    labels(&at);
  }
  assert_int_equal(*at, ' ');
  double value = strtod(at + 1, &end);
  assert_true(end != at + 1 && *end == '\0' && isfinite(value));
  assert_true(strcmp(of->type, "counter") != 0 || value >= 0);
  assert_true(strcmp(of->type, "info") != 0 || value == 1);
  assert_true(all->sample_count < MOST_SAMPLES && (size_t)(at - line) < sizeof all->samples[0]);
  for (int i = 0; i < all->sample_count; i++) { /* no series twice */
    assert_true(strncmp(all->samples[i], line, (size_t)(at - line)) != 0 || all->samples[i][at - line] != '\0');
  }
  memcpy(all->samples[all->sample_count], line, (size_t)(at - line));
  all->values[all->sample_count++] = value;
  of->samples++;
}

static void check_families(const exposition *all) {
  for (int i = 0; i < all->count; i++) {
    const family *of = &all->families[i];
    size_t length = strlen(of->name);
    assert_int_equal(of->types, 1);
    assert_int_equal(of->helps, 1);
    assert_true(of->units <= 1);
    assert_true(strcmp(of->type, "counter") == 0 || strcmp(of->type, "gauge") == 0 || strcmp(of->type, "info") == 0);
    assert_true(length < 6 || strcmp(of->name + length - 6, "_total") != 0); /* that is the sample's */
    if (of->units == 1) {
      size_t unit = strlen(of->unit);
      assert_true(length > unit + 1 && of->name[length - unit - 1] == '_');
      assert_string_equal(of->name + length - unit, of->unit);
    }
  }
}

static exposition *read_metrics(even_state *state, uint64_t now) {
  even_text text = EVEN_TEXT_EMPTY;
  exposition *all = calloc(1, sizeof *all);
  assert_non_null(all);
  even_monitor_metrics(state, now, &text);
  assert_int_equal(even_text_status(&text), EVEN_OK);
  assert_true(text.length > 0 && even_text_string(&text)[text.length - 1] == '\n');
  char *left = strdup(even_text_string(&text));
  assert_non_null(left);
  for (char *line = left, *next; *line != '\0'; line = next) {
    next = strchr(line, '\n') + 1;
    next[-1] = '\0';
    assert_false(all->ended); /* "# EOF" is the last line */
    if (line[0] == '#') {
      described(all, line);
    } else {
      sampled(all, line);
    }
  }
  assert_true(all->ended);
  check_families(all);
  free(left);
  even_text_free(&text);
  return all;
}

static double value_of(const exposition *all, const char *series) {
  for (int i = 0; i < all->sample_count; i++) {
    if (strcmp(all->samples[i], series) == 0) {
      return all->values[i];
    }
  }
  fail_msg("no %s", series);
  return NAN;
}

static even_state *open_state(const char *name, const char *device, int steps) {
  even_state *state = NULL;
  assert_int_equal(even_state_open(2, name, "evenstep run x.py", "hybrid", &state), EVEN_OK);
  state->started_ns = 1000000000;
  for (int rank = 0; rank < 2; rank++) {
    even_state_rank_facts(state, rank, device, "CPU", 1, NAN);
  }
  for (int step = 0; step < steps; step++) {
    for (int rank = 0; rank < 2; rank++) {
      const even_span_record span = {.step = (uint32_t)step, .span = EVEN_SPAN_DATA, .duration_ns = 20000000};
      const even_step_record record = {.step = (uint32_t)step,
                                       .end_ns = 1000000000 + (uint64_t)(step + 1) * 100000000,
                                       .duration_ns = 100000000,
                                       .busy_ns = rank == 0 ? 100000000 : 25000000,
                                       .samples = rank == 0 ? 12 : 4,
                                       .batch = 16,
                                       .loss = 2.5F,
                                       .predicted_seconds = 0.1F};
      even_state_span(state, rank, &span);
      even_state_step(state, rank, &record);
    }
  }
  return state;
}

static void a_run_that_trains_is_well_formed(void **unused) {
  (void)unused;
  even_state *state = open_state("run", "cpu:0", 20);
  const even_rank_usage usage = {.at_ns = 3000000000, .cpu_seconds = 1.5, .rss_bytes = 1e8, .throttled_seconds = 0.25};
  even_state_usage(state, 1, &usage);
  state->total = 100;
  state->rank[0].pid = 7;
  exposition *all = read_metrics(state, 3000000000);
  assert_float_equal(value_of(all, "evenstep_run_info{run=\"run\",policy=\"hybrid\"}"), 1, 0);
  assert_float_equal(value_of(all, "evenstep_steps_total"), 20, 0);
  assert_float_equal(value_of(all, "evenstep_samples_total"), 320, 0);
  assert_float_equal(value_of(all, "evenstep_throughput_samples_per_second"), 160, 1e-6F);
  assert_float_equal(value_of(all, "evenstep_planned_steps"), 100, 0);
  assert_float_equal(value_of(all, "evenstep_rank_wait_seconds_total{rank=\"1\",device=\"cpu:0\"}"), 1.5F, 1e-6F);
  assert_float_equal(value_of(all, "evenstep_rank_span_seconds_total{rank=\"0\",span=\"data\"}"), 0.4F, 1e-6F);
  assert_float_equal(value_of(all, "evenstep_rank_throttled_seconds_total{rank=\"1\",device=\"cpu:0\"}"), 0.25F, 0);
  assert_float_equal(value_of(all, "evenstep_rank_up{rank=\"0\",device=\"cpu:0\"}"), 1, 0);
  assert_float_equal(value_of(all, "evenstep_rank_up{rank=\"1\",device=\"cpu:0\"}"), 0, 0);
  free(all);
  even_state_close(state);
}

static void calls_of_groups_are_counters(void **unused) {
  (void)unused;
  even_state *state = open_state("run", "cpu:0", 6);
  const even_call_totals first = {.collectives = 10, .bytes = 1000, .bus_bytes = 1500, .ns = 100, .wait_ns = 50};
  const even_call_totals later = {.collectives = 30,
                                  .bytes = 5000000,
                                  .bus_bytes = 7500000,
                                  .ns = 3000000000,
                                  .wait_ns = 1000000000,
                                  .messages = 3,
                                  .message_bytes = 99};
  even_state_calls_seen(state, 1, 2000000000, &first);
  even_state_calls_seen(state, 1, 4000000000, &later);
  exposition *all = read_metrics(state, 4000000000);
#define OF_RANK(name) value_of(all, "evenstep_rank_" name "_total{rank=\"1\",device=\"cpu:0\"}")
  assert_float_equal(OF_RANK("collectives"), 30, 0);
  assert_float_equal(OF_RANK("collective_bytes"), 5000000, 0);
  assert_float_equal(OF_RANK("collective_bus_bytes"), 7500000, 0);
  assert_float_equal(OF_RANK("collective_seconds"), 3, 0);
  assert_float_equal(OF_RANK("collective_wait_seconds"), 1, 0);
  assert_float_equal(OF_RANK("messages"), 3, 0);
  assert_float_equal(OF_RANK("message_bytes"), 99, 0);
#undef OF_RANK
  free(all);
  even_state_close(state);
}

/* Nothing is measured: what is not known is left out, not said as NaN. */
static void a_run_that_only_starts_is_well_formed(void **unused) {
  (void)unused;
  even_state *state = open_state("run", "cpu:0", 0);
  exposition *all = read_metrics(state, 1000000000);
  assert_float_equal(value_of(all, "evenstep_steps_total"), 0, 0);
  for (int i = 0; i < all->count; i++) {
    assert_string_not_equal(all->families[i].name, "evenstep_loss");
  }
  free(all);
  even_state_close(state);
}

static void labels_are_escaped(void **unused) {
  (void)unused;
  even_state *state = open_state("a\"b\\c\nd\\n", "dev\"\\", 6);
  exposition *all = read_metrics(state, 1600000000);
  assert_float_equal(value_of(all, "evenstep_run_info{run=\"a\\\"b\\\\c\\nd\\\\n\",policy=\"hybrid\"}"), 1, 0);
  assert_float_equal(value_of(all, "evenstep_rank_samples_total{rank=\"1\",device=\"dev\\\"\\\\\"}"), 24, 0);
  free(all);
  even_state_close(state);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(a_run_that_trains_is_well_formed),
      cmocka_unit_test(calls_of_groups_are_counters),
      cmocka_unit_test(a_run_that_only_starts_is_well_formed),
      cmocka_unit_test(labels_are_escaped),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
