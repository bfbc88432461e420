/* evenstep report: a run in numbers and plots. */
#include "monitor/report.h"
#include "base/fail.h"
#include "cli/command.h"
#include "cli/run_folder.h"
#include "os/file.h"

#include <string.h>

typedef struct report_options {
  const char *compare;
  const char *plan;
  const char *output;
  const char *timeline;
  bool json;
} report_options;

/* Whatever the kernel calls it: the run is there, and its file is not. */
static even_status replace(const char *path, const even_text *content, const char *option) {
  if (even_file_replace(path, even_text_string(content), content->length) == EVEN_OK) {
    return EVEN_OK;
  }
  (void)even_error_means(EVEN_ERR_SYSTEM);
  return even_error_fix("%s FILE names one in a folder that is there, and that you may write to", option);
}

static even_status write_page(even_report *report, const char *path) {
  even_text page = EVEN_TEXT_EMPTY;
  even_report_page(report, &page);
  even_status status = even_text_status(&page);
  if (status == EVEN_OK) {
    status = replace(path, &page, "-o");
  }
  even_text_free(&page);
  return status;
}

static even_status write_timeline(even_report *report, const char *path) {
  even_text trace = EVEN_TEXT_EMPTY;
  even_status status = even_report_timeline(report, &trace);
  if (status == EVEN_OK) {
    status = replace(path, &trace, "--timeline");
  }
  even_text_free(&trace);
  return status;
}

static even_status print(even_report *report, const report_options *options, const char *path) {
  even_text lines = EVEN_TEXT_EMPTY;
  if (options->json) {
    even_report_json(report, &lines);
  } else {
    even_report_lines(report, even_cli_colour(stdout), &lines);
    even_text_format(&lines, "\n  the page with the plots: %s\n", path);
    if (options->timeline != NULL) {
      even_text_format(&lines, "  the timeline: %s (open it in https://ui.perfetto.dev or chrome://tracing)\n",
                       options->timeline);
    }
  }
  even_status status = even_text_status(&lines);
  if (status == EVEN_OK) {
    (void)fputs(even_text_string(&lines), stdout);
  }
  even_text_free(&lines);
  return status;
}

static even_status report_run(const char *name, const report_options *options) {
  even_text folder = EVEN_TEXT_EMPTY;
  even_text other = EVEN_TEXT_EMPTY;
  even_text path = EVEN_TEXT_EMPTY;
  even_report *report = NULL;
  even_status status = even_run_folder(name, &folder);
  if (status == EVEN_OK && options->compare != NULL) {
    status = even_run_folder(options->compare, &other);
  }
  if (status == EVEN_OK) {
    const even_report_params params = {.folder = even_text_string(&folder),
                                       .other = options->compare != NULL ? even_text_string(&other) : NULL,
                                       .plan = options->plan};
    status = even_report_open(&params, &report);
  }
  if (status == EVEN_OK) {
    even_text_format(&path, "%s/report.html", even_text_string(&folder));
    status = even_text_status(&path);
  }
  const char *output = options->output != NULL ? options->output : even_text_string(&path);
  if (status == EVEN_OK) {
    status = write_page(report, output);
  }
  if (status == EVEN_OK && options->timeline != NULL) {
    status = write_timeline(report, options->timeline);
  }
  if (status == EVEN_OK) {
    status = print(report, options, output);
  }
  even_report_close(report);
  even_text_free(&folder);
  even_text_free(&other);
  even_text_free(&path);
  return status;
}

int even_cli_report(int argc, char **argv) {
  report_options o = {NULL, NULL, NULL, NULL, false};
  const even_option options[] = {
      {0, "compare", EVEN_OPTION_TEXT, &o.compare, "RUN", "show another run beside it", 0, 0},
      {0, "plan", EVEN_OPTION_TEXT, &o.plan, "FILE", "the prediction of `evenstep plan` (default: the run's plan.json)",
       0, 0},
      {'o', "output", EVEN_OPTION_TEXT, &o.output, "FILE", "where the page goes (default: report.html of the run)", 0,
       0},
      {0, "timeline", EVEN_OPTION_TEXT, &o.timeline, "FILE",
       "also write every span of every rank as a Chrome trace (Perfetto, chrome://tracing)", 0, 0},
      {0, "json", EVEN_OPTION_FLAG, &o.json, NULL, "print the numbers as JSON", 0, 0},
  };
  const even_usage usage = {
      "report", "evenstep report [options] [RUN]",
      "Prints what a run reached and writes a page with plots that needs nothing else. RUN is a run's folder or a\n"
      "name in runs/; without it, the newest run. Runs that crashed or still run are reported as far as they came.",
      "example:\n  evenstep report runs/demo --compare runs/demo-equal", false};
  int operand = 0;
  int code = 0;
  if (!even_cli_begin(&usage, options, sizeof options / sizeof options[0], argc, argv, 1,
                      "a second run goes behind --compare", &operand, &code)) {
    return code;
  }
  even_status status = report_run(operand < argc ? argv[operand] : NULL, &o);
  return status == EVEN_OK ? 0 : even_cli_fail_of(status);
}
