/* One or two runs as JSON and as a page. */
#include "monitor/report.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "checkpoint/reader.h"
#include "monitor/json.h"
#include "monitor/page.h"
#include "monitor/parameters.h"
#include "monitor/report_run.h"
#include "monitor/timeline.h"
#include "os/file.h"
#include "os/folder.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { PAGE_RANK_POINTS = 32768, FEWEST_PAGE_POINTS = 128 };

/* The model of the newest whole checkpoint and its step; *path is NULL where there is none. */
static even_status newest_model(const char *folder, char **path, long *step) {
  even_text place = EVEN_TEXT_EMPTY;
  char *checkpoint = NULL;
  even_checkpoint_info info;
  memset(&info, 0, sizeof info);
  *path = NULL;
  even_text_format(&place, "%s/checkpoints", folder);
  even_status status = even_text_status(&place);
  if (status == EVEN_OK) {
    status = even_checkpoint_find_newest(even_text_string(&place), false, &checkpoint);
  }
  if (status == EVEN_OK && checkpoint != NULL) {
    status = even_checkpoint_inspect(checkpoint, &info);
    *step = (long)info.step;
    even_text_clear(&place);
    even_text_format(&place, "%s/model.safetensors", checkpoint);
    if (status == EVEN_OK && even_path_exists(even_text_string(&place))) {
      status = even_duplicate(even_text_string(&place), path);
    }
  }
  even_checkpoint_info_free(&info);
  even_free(checkpoint);
  even_text_free(&place);
  return status;
}

/* The comparison is an extra: what keeps it from being made is said in its place, not as the report's failure. */
static void compare_parameters(even_report *report) {
  char *mine = NULL;
  char *theirs = NULL;
  long my_step = -1;
  long their_step = -1;
  even_parameters_difference difference;
  report->difference = NAN;
  even_status status = newest_model(report->run.folder, &mine, &my_step);
  if (status == EVEN_OK) {
    status = newest_model(report->other.folder, &theirs, &their_step);
  }
  report->has_difference = status != EVEN_OK || (mine != NULL && theirs != NULL);
  if (status == EVEN_OK && mine != NULL && theirs != NULL) {
    report->difference_step = my_step;
    if (my_step != their_step) {
      (void)snprintf(report->difference_words, sizeof report->difference_words,
                     "The parameters are not compared: the last checkpoints are of step %ld and step %ld.", my_step,
                     their_step);
    } else if ((status = even_parameters_compare(mine, theirs, &difference)) == EVEN_OK) {
      report->difference = difference.relative_norm;
      (void)snprintf(report->difference_words, sizeof report->difference_words, "%zu tensors, %.0f numbers",
                     difference.tensors, difference.elements);
    }
  }
  if (status != EVEN_OK) {
    (void)snprintf(report->difference_words, sizeof report->difference_words, "The parameters are not compared: %.300s",
                   even_error_last()->what);
    even_error_clear();
  }
  even_free(mine);
  even_free(theirs);
}

even_status even_report_open(const even_report_params *params, even_report **out) {
  even_report *report = NULL;
  *out = NULL;
  EVEN_TRY(EVEN_NEW(&report));
  even_status status = even_report_run_open(params->folder, params->plan, &report->run);
  if (status == EVEN_OK && params->other != NULL) {
    status = even_report_run_open(params->other, params->plan, &report->other);
    if (status == EVEN_OK) {
      compare_parameters(report);
    }
  }
  if (status != EVEN_OK) {
    even_report_close(report);
    return status;
  }
  *out = report;
  return EVEN_OK;
}

void even_report_close(even_report *report) {
  if (report != NULL) {
    even_report_run_close(&report->run);
    even_report_run_close(&report->other);
    even_free(report);
  }
}

static void comparison(even_json *json, const even_report *report) {
  even_json_object(json, "comparison");
  even_json_number(json, "speedup",
                   report->run.analysis.samples_per_second / report->other.analysis.samples_per_second);
  if (report->has_difference) {
    even_json_object(json, "parameters");
    even_json_number(json, "relative_norm", report->difference);
    even_json_integer(json, "step", report->difference_step);
    even_json_string(json, "words", report->difference_words);
    even_json_object_end(json);
  } else {
    even_json_null(json, "parameters");
  }
  even_json_object_end(json);
}

void even_report_json(even_report *report, even_text *out) {
  even_json json = even_json_begin(out, 2);
  even_json_object(&json, NULL);
  even_json_string(&json, "format", "evenstep-report-1");
  even_report_run_json(&json, "run", &report->run);
  if (report->other.folder != NULL) {
    even_report_run_json(&json, "other", &report->other);
    comparison(&json, report);
  }
  even_json_object_end(&json);
  even_text_add(out, "\n");
}

/* Points of the course in a page: no more numbers for many ranks than for a few. */
static size_t page_points(int ranks) {
  size_t points = PAGE_RANK_POINTS / (size_t)ranks;
  return points > FEWEST_PAGE_POINTS ? points : FEWEST_PAGE_POINTS;
}

/* What the page shows of one run: as members of the object that is open. */
static void page_members(even_json *json, even_report_run *run, even_text *piece) {
  even_state *state = even_history_state(run->history);
  even_text_clear(piece);
  even_monitor_json_summary(state, &run->measure, piece);
  even_json_raw(json, "summary", even_text_string(piece));
  even_text_clear(piece);
  even_monitor_json_steps(state, -1, page_points(state->ranks), piece);
  even_json_raw(json, "steps", even_text_string(piece));
  even_text_clear(piece);
  even_monitor_json_spans(state, &run->measure, piece);
  even_json_raw(json, "spans", even_text_string(piece));
  even_text_clear(piece);
  even_monitor_json_events(state, 0, piece);
  even_json_raw(json, "events", even_text_string(piece));
  even_report_run_json(json, "report", run);
}

void even_report_page(even_report *report, even_text *out) {
  even_text data = EVEN_TEXT_EMPTY;
  even_text piece = EVEN_TEXT_EMPTY;
  even_json json = even_json_begin(&data, 0);
  even_json_object(&json, NULL);
  even_json_string(&json, "format", "evenstep-report-1");
  page_members(&json, &report->run, &piece);
  if (report->other.folder != NULL) {
    even_json_object(&json, "other");
    page_members(&json, &report->other, &piece);
    even_json_object_end(&json);
    comparison(&json, report);
  }
  even_json_object_end(&json);
  even_status status = even_text_status(&data) != EVEN_OK ? even_text_status(&data) : even_text_status(&piece);
  if (status == EVEN_OK) {
    even_page_with_data(even_text_string(&data), out);
  } else {
    out->status = status;
  }
  even_text_free(&data);
  even_text_free(&piece);
}

even_status even_report_timeline(even_report *report, even_text *out) {
  return even_timeline_write(report->run.history, out);
}

even_status even_report_write_page(const char *folder) {
  const even_report_params params = {.folder = folder};
  even_report *report = NULL;
  even_text page = EVEN_TEXT_EMPTY;
  even_text path = EVEN_TEXT_EMPTY;
  EVEN_TRY(even_report_open(&params, &report));
  even_report_page(report, &page);
  even_text_format(&path, "%s/report.html", folder);
  even_status status = even_text_status(&page) != EVEN_OK ? even_text_status(&page) : even_text_status(&path);
  if (status == EVEN_OK) {
    status = even_file_replace(even_text_string(&path), even_text_string(&page), page.length);
  }
  even_text_free(&page);
  even_text_free(&path);
  even_report_close(report);
  return status;
}
