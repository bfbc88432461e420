/* evenstep drain: takes a host out of a job of several that runs. */
#include "base/fail.h"
#include "base/json_writer.h"
#include "cli/command.h"
#include "cli/run_folder.h"
#include "orchestrator/control.h"
#include "orchestrator/hosts.h"

#include <stdlib.h>
#include <string.h>

enum { MOST_RANKS_A_HOST = 1024 };

static const even_usage usage = {
    .command = "drain",
    .synopsis = "evenstep drain [--to HOST[:N][,HOST…]] [options] HOST | --lost",
    .description =
        "Takes a host out of a job of several that runs. Its ranks go to the hosts that --to names; without\n"
        "it, to hosts of the job that have a GPU (or, without any, a core) left for each, as many as find\n"
        "one. The processes that go on are started first, and come to es.prepare while the others still\n"
        "train; then the training saves its state after the step under way, and goes on from there. No\n"
        "restart of --max-restarts is used up. HOST is its name as `evenstep run` says it. Typed on the\n"
        "host that leads the job; returns when HOST is free. Ctrl-C ends the waiting, not the draining.\n"
        "The host that leads is drained where another one can take its place (--replace-leader): that one\n"
        "leads first. --lost: this job waits for the majority of its hosts, and those that are missing are\n"
        "lost for good: it goes on without them. Where they only are cut off and go on, two jobs train.",
    .epilogue =
        "exit codes:\n"
        "  0 the host is out of the job, 3 no such host, or no such job on this host,\n"
        "  7 the job ended first, or a host of --to cannot be reached, 8 the host leads the job and nobody\n"
        "  ever takes its place, 9 too few ranks would be left, nobody can lead in its place now, or the job\n"
        "  waits for no lost host; where it is not 0 and not 7 the job goes on as it was\n"
        "\n"
        "examples:\n"
        "  evenstep drain node7                       # of the run in runs/ that lives\n"
        "  evenstep drain node7 --to node9            # one that is not in the job yet: reached as those of --hosts\n"
        "  evenstep drain node7 --to node8:1,node9:3\n"
        "  evenstep drain --run night --no-move node7 # the others go on with their own ranks",
};

typedef struct drain_wish {
  const char *run;
  const char *host;
  const char *to;
  bool no_move;
  bool cold;
  bool lost;
} drain_wish;

static even_status bad_list(const char *list, const char *why) {
  (void)even_fail(EVEN_ERR_USAGE, "--to %s: %s", list, why);
  return even_error_fix("give names of hosts, each with a number of ranks where it shall not be left open: --to a:2,b");
}

/* HOST[:N][,HOST…]: what the names mean the agent says, which has the hosts. */
static even_status add_targets(const char *list, even_json *json) {
  const char *at = list;
  even_json_array(json, "to");
  while (at != NULL) {
    char name[EVEN_HOSTS_NAME];
    size_t length = strcspn(at, ",");
    size_t letters = strcspn(at, ":,");
    char *end = NULL;
    long ranks = 0;
    if (letters == 0 || letters >= sizeof name) {
      return bad_list(list, "not the name of a host");
    }
    if (letters < length) {
      ranks = strtol(at + letters + 1, &end, 10);
      if (end != at + length || end == at + letters + 1 || ranks < 1 || ranks > MOST_RANKS_A_HOST) {
        return bad_list(list, "not a number of ranks");
      }
    }
    (void)snprintf(name, sizeof name, "%.*s", (int)letters, at);
    even_json_object(json, NULL);
    even_json_string(json, "host", name);
    even_json_integer(json, "ranks", ranks);
    even_json_object_end(json);
    at = at[length] == '\0' ? NULL : at + length + 1;
  }
  even_json_array_end(json);
  return EVEN_OK;
}

static even_status write_command(const drain_wish *wish, even_text *line) {
  even_json json = even_json_begin(line, 0);
  even_json_object(&json, NULL);
  even_json_string(&json, "command", wish->lost ? "lost" : "drain");
  even_json_string(&json, "host", wish->host);
  if (wish->to != NULL) {
    EVEN_TRY(add_targets(wish->to, &json));
  }
  even_json_bool(&json, "stay", wish->no_move);
  even_json_bool(&json, "cold", wish->cold);
  even_json_object_end(&json);
  return even_text_status(line);
}

static even_status ask(const drain_wish *wish) {
  even_text folder = EVEN_TEXT_EMPTY;
  even_text line = EVEN_TEXT_EMPTY;
  even_status status = write_command(wish, &line);
  if (status == EVEN_OK) {
    status = even_run_folder_at_all(wish->run, &folder);
  }
  if (status == EVEN_OK) {
    status = even_control_ask(even_text_string(&folder), line.data, even_cli_say, NULL);
    if (status == EVEN_ERR_NOT_FOUND && even_error_last()->fix[0] == '\0') {
      (void)even_error_fix(
          "no job of several hosts that this host leads runs there; type it on the host that leads it");
    }
  }
  even_text_free(&line);
  even_text_free(&folder);
  return status;
}

int even_cli_drain(int argc, char **argv) {
  drain_wish wish = {.run = NULL};
  const even_option options[] = {
      {0, "to", EVEN_OPTION_TEXT, &wish.to, "HOST[:N],…",
       "hosts that take its ranks, of the job or new; N of them each", 0, 0},
      {0, "no-move", EVEN_OPTION_FLAG, &wish.no_move, NULL, "its ranks go nowhere: the job has fewer", 0, 0},
      {0, "cold", EVEN_OPTION_FLAG, &wish.cold, NULL, "start no process before the others have ended", 0, 0},
      {0, "lost", EVEN_OPTION_FLAG, &wish.lost, NULL, "the hosts for which the job waits are lost for good", 0, 0},
      {0, "run", EVEN_OPTION_TEXT, &wish.run, "RUN",
       "the run's folder, or its name in runs/ (default: the one that lives)", 0, 0},
  };
  int operand = 0;
  int code = 0;
  if (!even_cli_begin(&usage, options, sizeof options / sizeof options[0], argc, argv, 1, NULL, &operand, &code)) {
    return code;
  }
  if (wish.lost && (operand < argc || wish.to != NULL || wish.no_move || wish.cold)) {
    (void)even_fail(EVEN_ERR_USAGE, "drain: --lost is of the hosts for which the job waits, and takes --run alone");
    (void)even_error_fix("leave the rest out");
    return even_cli_fail();
  }
  if (operand >= argc && !wish.lost) {
    (void)even_fail(EVEN_ERR_USAGE, "drain: no host was named");
    (void)even_error_fix("%s", usage.synopsis);
    return even_cli_fail();
  }
  if (wish.no_move && wish.to != NULL) {
    (void)even_fail(EVEN_ERR_USAGE, "drain: --to says where its ranks go, and --no-move that they go nowhere");
    (void)even_error_fix("leave out one of the two");
    return even_cli_fail();
  }
  wish.host = wish.lost ? NULL : argv[operand];
  even_status status = ask(&wish);
  return status == EVEN_OK ? 0 : even_cli_fail_of(status);
}
