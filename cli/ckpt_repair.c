/* evenstep ckpt repair: damaged chunks of a checkpoint, from a copy of it. */
#include "base/fail.h"
#include "base/json_writer.h"
#include "checkpoint/reader.h"
#include "ckpt.h"
#include "command.h"

#include <stdio.h>
#include <string.h>

static void write_names(even_json *json, const char *key, const even_names *names) {
  even_json_array(json, key);
  for (size_t i = 0; i < names->count; i++) {
    even_json_string(json, NULL, names->items[i]);
  }
  even_json_array_end(json);
}

static void print_json(const char *path, const even_names *repaired, const even_names *left) {
  even_text text = EVEN_TEXT_EMPTY;
  even_json json = even_json_begin(&text, 2);
  even_json_object(&json, NULL);
  even_json_string(&json, "path", path);
  write_names(&json, "repaired", repaired);
  write_names(&json, "left", left);
  even_json_object_end(&json);
  (void)printf("%s\n", even_text_string(&text));
  even_text_free(&text);
}

static void print_text(const char *path, even_status status, const even_names *repaired, const even_names *left) {
  (void)printf("%s: %s\n", path,
               status == EVEN_ERR_CORRUPT ? "DAMAGED still"
               : repaired->count == 0     ? "whole, nothing to repair"
                                          : "whole again");
  for (size_t i = 0; i < repaired->count; i++) {
    (void)printf("  repaired: %s\n", repaired->items[i]);
  }
  for (size_t i = 0; i < left->count; i++) {
    (void)printf("  damaged in both: %s\n", left->items[i]);
  }
}

/* What was repaired is compared once more, as any other checkpoint. */
static int repair(const char *path, const char *copy, bool as_json) {
  even_names repaired = {NULL, 0};
  even_names left = {NULL, 0};
  even_status status = even_checkpoint_repair(path, copy, &repaired, &left);
  if (status == EVEN_OK) {
    status = even_checkpoint_verify(path, NULL);
  }
  int code = even_status_exit_code(status);
  if (status != EVEN_OK && (status != EVEN_ERR_CORRUPT || left.count == 0)) {
    code = even_cli_fail_of(status);
  } else if (as_json) {
    print_json(path, &repaired, &left);
  } else {
    print_text(path, status, &repaired, &left);
  }
  even_names_free(&repaired);
  even_names_free(&left);
  return code;
}

int even_cli_ckpt_repair(int argc, char **argv) {
  const char *copy = NULL;
  bool as_json = false;
  int operand = 0;
  int code = 0;
  const even_usage usage = {
      .command = "ckpt repair",
      .synopsis = "evenstep ckpt repair [options] PATH --from COPY",
      .description =
          "Puts right what is damaged in a checkpoint, by a copy of the same one: each chunk of the copy is\n"
          "compared with its checksum before it is used. Both may be damaged, in different places.",
      .epilogue =
          "exit code: 0 it is whole, 6 something is damaged in both, 3 one is not there or COPY is no copy of it"};
  const even_option options[] = {
      {0, "from", EVEN_OPTION_TEXT, &copy, "COPY", "a folder that the checkpoint was copied to", 0, 0},
      {0, "json", EVEN_OPTION_FLAG, &as_json, NULL, "print JSON", 0, 0},
  };
  if (!even_cli_begin(&usage, options, sizeof options / sizeof options[0], argc, argv, 1, "it repairs one checkpoint",
                      &operand, &code)) {
    return code;
  }
  if (argc - operand != 1 || copy == NULL) {
    (void)even_fail(EVEN_ERR_USAGE, "ckpt repair: name a checkpoint and a copy of it");
    (void)even_error_fix("evenstep ckpt repair PATH --from COPY");
    return even_cli_fail();
  }
  return repair(argv[operand], copy, as_json);
}
