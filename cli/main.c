/* evenstep: finds the command and runs it. */
#include "base/fail.h"
#include "base/nearest.h"
#include "cli/command.h"
#include "os/descriptors.h"

#include <evenstep/version.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <unistd.h>

static int version(int argc, char **argv) {
  (void)argc;
  (void)argv;
  const char *commit = even_commit();
  (void)printf("evenstep %s%s%s%s\n", even_version(), commit[0] == '\0' ? "" : " (commit ", commit,
               commit[0] == '\0' ? "" : ")");
  return 0;
}

static const even_command commands[] = {
    /* one line a command, in the order of a user's day */
    {"doctor", "what is here, what is missing, and what that costs", even_cli_doctor},
    {"devices", "what this host has and what a rank may use of it", even_cli_devices},
    {"profile", "measure how fast each device is", even_cli_profile},
    {"plan", "predict shares, step time and memory from a few measured steps", even_cli_plan},
    {"verify", "whether training on several ranks comes to what one device comes to", even_cli_verify},
    {"run", "train: start a script on every device, watched and restarted", even_cli_run},
    {"join", "take part, with this host, in a job that runs already", even_cli_join},
    {"drain", "take a host out of a job that runs", even_cli_drain},
    {"agent", "serve a job of several hosts (started by run --hosts)", even_cli_agent},
    {"ckpt", "list, check and show checkpoints", even_cli_ckpt},
    {"chaos", "disturb a training on purpose, and see that it comes to the same", even_cli_chaos},
    {"top", "what a run does now, in the terminal", even_cli_top},
    {"report", "what a run reached, as a page and a table", even_cli_report},
    {"timeline", "one trace of the files of ranks that had no agent", even_cli_timeline},
    {"bench", "how fast ranks exchange data; what balancing reaches on unequal ones", even_cli_bench},
    {"version", "the version of this program", version},
};

enum { COMMAND_COUNT = sizeof commands / sizeof commands[0] };

static void help(FILE *stream) {
  (void)fprintf(stream,
                "evenstep %s: trains PyTorch models on unequal devices, each with the work it can "
                "finish in the same time\n\nusage: evenstep COMMAND [options]\n\n",
                even_version());
  for (size_t i = 0; i < COMMAND_COUNT; i++) {
    (void)fprintf(stream, "  %-10s %s\n", commands[i].name, commands[i].summary);
  }
  (void)fprintf(stream, "\n`evenstep COMMAND --help` tells more of each.\n");
}

static int unknown(const char *word) {
  const char *names[COMMAND_COUNT + 1];
  for (size_t i = 0; i < COMMAND_COUNT; i++) {
    names[i] = commands[i].name;
  }
  const char *nearest = even_nearest(word, names, COMMAND_COUNT);
  (void)even_fail(EVEN_ERR_USAGE, "unknown command \"%s\"", word);
  if (nearest != NULL) {
    (void)even_error_fix("did you mean `evenstep %s`? `evenstep --help` lists the commands", nearest);
  } else {
    (void)even_error_fix("`evenstep --help` lists the commands");
  }
  return even_cli_fail();
}

/* Whether standard output has not taken all (a full disk). A reader that went away (`| head`) wants no more, and who
 * closed it (it cannot be written to then: os/descriptors.h) wants nothing. */
static bool has_lost_output(void) {
  struct pollfd reader = {.fd = STDOUT_FILENO};
  bool failed = fflush(stdout) != 0;
  failed = ferror(stdout) != 0 || failed;
  if (!failed || (fcntl(STDOUT_FILENO, F_GETFL) & O_ACCMODE) == O_RDONLY) {
    return false;
  }
  return poll(&reader, 1, 0) != 1 || (reader.revents & (POLLERR | POLLHUP)) == 0;
}

static int end(const char *name, int code) {
  if (!has_lost_output()) {
    return code;
  }
  (void)even_fail(EVEN_ERR_SYSTEM, "%s: standard output has not taken all that was printed", name);
  (void)even_error_fix("see whether its disk is full");
  int lost = even_cli_fail();
  return code != 0 ? code : lost;
}

static int run(const even_command *command, int argc, char **argv) {
  int code = command->run(argc, argv);
  int ended = end(command->name, code);
  return command->run == even_cli_run ? code : ended; /* a training that ended well did */
}

int main(int argc, char **argv) {
  even_descriptors_fill_standard();
  if (argc < 2) {
    help(stderr);
    return even_status_exit_code(EVEN_ERR_USAGE);
  }
  if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 || strcmp(argv[1], "help") == 0) {
    help(stdout);
    return end("help", 0);
  }
  if (strcmp(argv[1], "--version") == 0) {
    return end("version", version(0, NULL));
  }
  for (size_t i = 0; i < COMMAND_COUNT; i++) {
    if (strcmp(argv[1], commands[i].name) == 0) {
      return run(&commands[i], argc - 2, argv + 2);
    }
  }
  return unknown(argv[1]);
}
