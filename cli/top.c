/* evenstep top: the live view of a run, from any terminal. */
#include "base/fail.h"
#include "cli/command.h"
#include "cli/run_folder.h"
#include "monitor/history.h"
#include "monitor/json.h"
#include "monitor/view.h"
#include "os/clock.h"
#include "os/keys.h"
#include "os/loop.h"
#include "os/signals.h"
#include "os/terminal.h"

#include <string.h>
#include <unistd.h>

enum { REFRESH_MS = 1000, DEFAULT_COLUMNS = 100, CTRL_C = 3, CTRL_D = 4 };

typedef struct top {
  const char *folder;
  even_history *history;
  even_keys keys;
  even_signals signals;
  even_loop loop;
  even_loop_watch key_watch;
  even_loop_watch signal_watch;
  int drawn_lines;
  bool quit;
} top;

static even_status print_json(top *view) {
  even_text text = EVEN_TEXT_EMPTY;
  even_measure measure;
  even_state_measure(even_history_state(view->history), even_clock_ns(), &measure);
  even_monitor_json_summary(even_history_state(view->history), &measure, &text);
  even_status status = even_text_status(&text);
  if (status == EVEN_OK) {
    (void)printf("%s\n", even_text_string(&text));
    (void)fflush(stdout);
  }
  even_text_free(&text);
  return status;
}

static even_status draw(top *view, bool replace) {
  even_text text = EVEN_TEXT_EMPTY;
  int rows = 0;
  int columns = DEFAULT_COLUMNS;
  bool terminal = even_terminal_size(STDOUT_FILENO, &rows, &columns);
  even_view_draw(even_history_state(view->history), even_clock_ns(), columns, even_cli_colour(stdout), &text);
  even_status status = even_text_status(&text);
  if (status == EVEN_OK) {
    if (replace && terminal && view->drawn_lines > 0) {
      (void)printf("\r\033[%dA\033[J", view->drawn_lines);
    }
    (void)fputs(even_text_string(&text), stdout);
    (void)fflush(stdout);
    view->drawn_lines = 0;
    for (size_t i = 0; i < text.length; i++) {
      view->drawn_lines += text.data[i] == '\n';
    }
  }
  even_text_free(&text);
  return status;
}

static void on_key(void *context, int fd) {
  top *view = context;
  int key = even_keys_next(fd);
  if (key < 0) {
    even_loop_remove(&view->loop, &view->key_watch); /* no input any more: go on until the run ends */
  }
  view->quit = view->quit || key == 'q' || key == 'Q' || key == CTRL_C || key == CTRL_D;
}

static void on_signal(void *context, int fd) {
  top *view = context;
  (void)fd;
  for (int signal = even_signals_next(&view->signals); signal != 0; signal = even_signals_next(&view->signals)) {
    view->quit = view->quit || signal != SIGCHLD;
  }
}

/* Whether the run is over: it said so, or its agent is gone. */
static bool over(top *view) {
  if (!even_history_ended(view->history) && even_history_alive(view->folder)) {
    return false;
  }
  even_history_give_up(view->history);
  return true;
}

static even_status follow(top *view, bool json) {
  for (;;) {
    bool last = over(view); /* asked before reading, so that nothing written after it is missed */
    EVEN_TRY(even_history_read(view->history));
    if (last) {
      even_history_give_up(view->history);
    }
    EVEN_TRY(json ? print_json(view) : draw(view, true));
    if (last || view->quit) {
      return EVEN_OK;
    }
    uint64_t until = even_clock_ns() + (uint64_t)REFRESH_MS * 1000000U;
    for (uint64_t now = even_clock_ns(); !view->quit && now < until; now = even_clock_ns()) {
      EVEN_TRY(even_loop_turn(&view->loop, (int)((until - now) / 1000000U) + 1));
    }
    if (view->quit) {
      return EVEN_OK;
    }
  }
}

static even_status watch(top *view, bool json) {
  even_status status = even_loop_open(&view->loop);
  if (status == EVEN_OK) {
    status = even_signals_open(&view->signals);
  }
  if (status == EVEN_OK) {
    status = even_loop_add(&view->loop, &view->signal_watch, view->signals.fd, on_signal, view);
  }
  if (status == EVEN_OK) {
    status = even_keys_open(STDIN_FILENO, &view->keys);
  }
  if (status == EVEN_OK && view->keys.fd >= 0) {
    status = even_loop_add(&view->loop, &view->key_watch, STDIN_FILENO, on_key, view);
  }
  if (status == EVEN_OK) {
    status = follow(view, json);
  }
  even_keys_close(&view->keys);
  even_signals_close(&view->signals);
  even_loop_close(&view->loop);
  return status;
}

static even_status show(const char *name, bool once, bool json) {
  even_text folder = EVEN_TEXT_EMPTY;
  top view = {.keys = {.fd = -1},
              .signals = {.fd = -1},
              .loop = {.fd = -1},
              .key_watch = {.fd = -1},
              .signal_watch = {.fd = -1}};
  even_status status = even_run_folder(name, &folder);
  if (status == EVEN_OK) {
    view.folder = even_text_string(&folder);
    status = even_history_open(view.folder, &view.history);
  }
  if (status == EVEN_OK && once) {
    (void)over(&view);
    status = json ? print_json(&view) : draw(&view, false);
  } else if (status == EVEN_OK) {
    status = watch(&view, json);
  }
  even_history_close(view.history);
  even_text_free(&folder);
  return status;
}

int even_cli_top(int argc, char **argv) {
  bool once = false;
  bool json = false;
  const even_option options[] = {
      {0, "once", EVEN_OPTION_FLAG, &once, NULL, "show it once and end", 0, 0},
      {0, "json", EVEN_OPTION_FLAG, &json, NULL, "one JSON object a second, one a line", 0, 0},
  };
  const even_usage usage = {"top", "evenstep top [options] [RUN]",
                            "Shows what a run does now, once a second, until it ends. RUN is a run's folder or a name\n"
                            "in runs/; without it, the run that lives, or the newest.",
                            "keys: q or Ctrl-C ends the view (not the run)", false};
  int operand = 0;
  int code = 0;
  if (!even_cli_begin(&usage, options, sizeof options / sizeof options[0], argc, argv, 1, NULL, &operand, &code)) {
    return code;
  }
  even_status status = show(operand < argc ? argv[operand] : NULL, once, json);
  return status == EVEN_OK ? 0 : even_cli_fail_of(status);
}
