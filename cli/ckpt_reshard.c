/* evenstep ckpt reshard IN OUT, push PATH URL and fetch URL DIR: done by modules of Python. */
#include "base/fail.h"
#include "cli/ckpt.h"
#include "cli/ckpt_python.h"
#include "cli/command.h"

#include <inttypes.h>
#include <stdio.h>

static const even_usage reshard_usage = {
    .command = "ckpt reshard",
    .synopsis = "evenstep ckpt reshard [options] IN OUT",
    .description =
        "Writes the same tensors into other files: as many as --files says, or of at most --shard-bytes each. IN is "
        "an\n"
        "Evenstep checkpoint (OUT is one, too), a Hugging Face folder or a .safetensors file (OUT is such a folder, "
        "with\n"
        "model.safetensors.index.json). No tensor is cut. What was written is read back and compared bit by bit."};
static const even_usage push_usage = {
    .command = "ckpt push",
    .synopsis = "evenstep ckpt push [options] PATH URL",
    .description =
        "Uploads a checkpoint to URL/NAME, its manifest last. URL: s3://bucket/run, gs://…, sftp://…, file://… and\n"
        "whatever fsspec has a driver for."};
static const even_usage fetch_usage = {
    .command = "ckpt fetch",
    .synopsis = "evenstep ckpt fetch [options] URL DIR",
    .description =
        "Downloads the checkpoint at URL, or the newest whole one in it, to DIR/NAME, every checksum compared\n"
        "before it gets that name, and prints where it is: for --resume."};

typedef struct request {
  const char *python;
  int64_t files, shard_bytes;
  bool force, as_json;
} request;

static bool begin(const even_usage *usage, const even_option *options, size_t count, int argc, char **argv,
                  int *operand, int *code) {
  if (!even_cli_begin(usage, options, count, argc, argv, 2, usage->synopsis, operand, code)) {
    return false;
  }
  if (argc - *operand != 2) {
    (void)even_fail(EVEN_ERR_USAGE, "%s: what, and where to?", usage->command);
    (void)even_error_fix("%s", usage->synopsis);
    *code = even_cli_fail();
    return false;
  }
  return true;
}

int even_cli_ckpt_reshard(int argc, char **argv) {
  request on = {.files = 0};
  const even_option options[] = {
      {0, "files", EVEN_OPTION_INTEGER, &on.files, "N", "how many files each model has", 1, 99999},
      {0, "shard-bytes", EVEN_OPTION_INTEGER, &on.shard_bytes, "N", "most bytes of tensors in one file", 1, INT64_MAX},
      {0, "force", EVEN_OPTION_FLAG, &on.force, NULL, "replace a checkpoint's folder that is there", 0, 0},
      {0, "python", EVEN_OPTION_TEXT, &on.python, "PATH", "the interpreter that has torch and evenstep", 0, 0},
      {0, "json", EVEN_OPTION_FLAG, &on.as_json, NULL, "print what was done as JSON", 0, 0}};
  char numbers[2][24];
  const char *words[EVEN_CKPT_PYTHON_MOST_WORDS];
  size_t count = 0;
  int operand = 0;
  int code = 0;
  if (!begin(&reshard_usage, options, sizeof options / sizeof options[0], argc, argv, &operand, &code)) {
    return code;
  }
  if (on.files > 0) {
    (void)snprintf(numbers[0], sizeof numbers[0], "%" PRId64, on.files);
    words[count++] = "--files";
    words[count++] = numbers[0];
  }
  if (on.shard_bytes > 0) {
    (void)snprintf(numbers[1], sizeof numbers[1], "%" PRId64, on.shard_bytes);
    words[count++] = "--shard-bytes";
    words[count++] = numbers[1];
  }
  if (on.force) {
    words[count++] = "--force";
  }
  words[count++] = "--"; /* a path may begin with a dash */
  words[count++] = argv[operand];
  words[count++] = argv[operand + 1];
  return even_ckpt_python(on.python, "evenstep.checkpoint_reshard", words, count, on.as_json);
}

static int move(const even_usage *usage, const char *verb, int argc, char **argv) {
  request on = {.files = 0};
  const even_option options[] = {
      {0, "python", EVEN_OPTION_TEXT, &on.python, "PATH", "the interpreter that has torch and evenstep", 0, 0},
      {0, "json", EVEN_OPTION_FLAG, &on.as_json, NULL, "print where it is as JSON", 0, 0}};
  int operand = 0;
  int code = 0;
  if (!begin(usage, options, sizeof options / sizeof options[0], argc, argv, &operand, &code)) {
    return code;
  }
  const char *words[] = {verb, argv[operand], argv[operand + 1]};
  return even_ckpt_python(on.python, "evenstep.checkpoint_remote", words, 3, on.as_json);
}

int even_cli_ckpt_push(int argc, char **argv) {
  return move(&push_usage, "push", argc, argv);
}

int even_cli_ckpt_fetch(int argc, char **argv) {
  return move(&fetch_usage, "fetch", argc, argv);
}
