/* evenstep timeline: the files that ranks without an agent wrote, as one. */
#include "base/fail.h"
#include "base/json_reader.h"
#include "cli/command.h"
#include "os/file.h"

#include <stdlib.h>
#include <string.h>

enum { MOST_HOSTS = 1024 };
static const size_t FILE_LIMIT_BYTES = (size_t)4 << 30;

/* A host's clock: what its files' times are ahead of those of the first one's. */
typedef struct host_clock {
  const char *host; /* of an event that is kept */
  double since_1970_us;
} host_clock;

typedef struct merging {
  json_t *events;
  host_clock hosts[MOST_HOSTS];
  size_t host_count;
} merging;

/* The events of one file. One whose rank was killed has no end: what is whole of it counts. */
static even_status read_events(const char *path, json_t **out) {
  even_text text = EVEN_TEXT_EMPTY;
  even_status status = even_file_read(path, FILE_LIMIT_BYTES, &text);
  if (status == EVEN_OK && even_json_parse(path, even_text_string(&text), text.length, out) != EVEN_OK) {
    size_t end = text.length;
    while (end > 1 && !(text.data[end - 1] == '\n' && text.data[end - 2] == ',')) {
      end--;
    }
    if (end > 1) {
      text.length = end - 2;
      text.data[text.length] = '\0';
    }
    even_text_add(&text, "]");
    status = even_text_status(&text);
    status = status == EVEN_OK ? even_json_parse(path, even_text_string(&text), text.length, out) : status;
  }
  even_text_free(&text);
  if (status == EVEN_OK && !json_is_array(*out)) {
    json_decref(*out);
    *out = NULL;
    (void)even_fail(EVEN_ERR_INPUT, "%s is no timeline of a rank", path);
    status = even_error_fix("give the files FILE.rank-N.json that EVENSTEP_TIMELINE=FILE made");
  }
  return status;
}

/* The clock of a file, by its event evenstep_clock; the first of each host counts, since ranks of a host share it. */
static double offset_of(merging *all, const json_t *events) {
  size_t index = 0;
  json_t *event = NULL;
  json_array_foreach(events, index, event) {
    const char *name = json_string_value(json_object_get(event, "name"));
    if (name == NULL || strcmp(name, "evenstep_clock") != 0) {
      continue;
    }
    const json_t *told = json_object_get(event, "args");
    const char *host = json_string_value(json_object_get(told, "host"));
    double since = json_number_value(json_object_get(told, "since_1970_us"));
    for (size_t i = 0; host != NULL && i < all->host_count; i++) {
      if (strcmp(all->hosts[i].host, host) == 0) {
        return all->hosts[i].since_1970_us - all->hosts[0].since_1970_us;
      }
    }
    if (host != NULL && all->host_count < MOST_HOSTS) {
      all->hosts[all->host_count++] = (host_clock){.host = host, .since_1970_us = since};
      return since - all->hosts[0].since_1970_us;
    }
  }
  return 0;
}

static even_status add_file(merging *all, const char *path) {
  json_t *events = NULL;
  size_t index = 0;
  json_t *event = NULL;
  EVEN_TRY(read_events(path, &events));
  double offset = offset_of(all, events);
  json_array_foreach(events, index, event) {
    json_t *at = json_object_get(event, "ts");
    if (json_is_number(at) && offset != 0) {
      (void)json_object_set_new(event, "ts", json_real(json_number_value(at) + offset));
    }
  }
  int failed = json_array_extend(all->events, events);
  json_decref(events);
  return failed == 0 ? EVEN_OK : even_fail(EVEN_ERR_MEMORY, "no memory for the events of %s", path);
}

static even_status write_all(const merging *all, const char *path) {
  json_t *trace = json_pack("{s:s, s:O}", "displayTimeUnit", "ms", "traceEvents", all->events);
  char *text = trace == NULL ? NULL : json_dumps(trace, JSON_COMPACT | JSON_REAL_PRECISION(17));
  json_decref(trace);
  if (text == NULL) {
    return even_fail(EVEN_ERR_MEMORY, "no memory for the timeline");
  }
  even_status status = even_file_replace(path, text, strlen(text));
  free(text);
  return status;
}

int even_cli_timeline(int argc, char **argv) {
  const char *output = "timeline.json";
  const even_option options[] = {
      {'o', "output", EVEN_OPTION_TEXT, &output, "FILE", "where it goes (default timeline.json)", 0, 0},
  };
  const even_usage usage = {
      "timeline", "evenstep timeline [options] FILE.rank-0.json FILE.rank-1.json …",
      "Makes one Chrome trace of the files that the ranks wrote under EVENSTEP_TIMELINE=FILE, without `evenstep run`\n"
      "(torchrun, mpirun). Ranks of a host share a clock; hosts are laid on one axis by their clocks of the day.",
      "example:\n  EVENSTEP_TIMELINE=t torchrun --nproc-per-node 2 train.py && evenstep timeline -o t.json "
      "t.rank-*.json\n"
      "A run of `evenstep run --timeline` has its own: `evenstep report RUN --timeline FILE`.",
      false};
  int operand = 0;
  int code = 0;
  if (!even_cli_begin(&usage, options, sizeof options / sizeof options[0], argc, argv, -1, NULL, &operand, &code)) {
    return code;
  }
  if (operand == argc) {
    (void)even_fail(EVEN_ERR_USAGE, "no file is named");
    (void)even_error_fix("evenstep timeline FILE.rank-*.json");
    return even_cli_fail();
  }
  merging all = {.events = json_array()};
  even_status status = all.events == NULL ? even_fail(EVEN_ERR_MEMORY, "no memory") : EVEN_OK;
  for (int i = operand; status == EVEN_OK && i < argc; i++) {
    status = add_file(&all, argv[i]);
  }
  status = status == EVEN_OK ? write_all(&all, output) : status;
  json_decref(all.events);
  if (status == EVEN_OK) {
    (void)printf("%s: open it in https://ui.perfetto.dev or chrome://tracing\n", output);
  }
  return status == EVEN_OK ? 0 : even_cli_fail_of(status);
}
