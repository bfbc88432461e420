/* evenstep bench comm | balance. */
#include "cli/bench.h"
#include "base/fail.h"
#include "base/nearest.h"
#include "cli/command.h"

#include <string.h>

static const even_command benches[] = {
    {"comm", "how fast ranks exchange data, beside Gloo, MPI and the memory itself", even_bench_comm},
    {"balance", "what each way of sharing work out reaches on unequal devices", even_bench_balance},
};

enum { BENCHES = sizeof benches / sizeof benches[0] };

static int help(void) {
  (void)printf("usage: evenstep bench COMMAND [options]\n\n");
  for (size_t i = 0; i < BENCHES; i++) {
    (void)printf("  %-8s %s\n", benches[i].name, benches[i].summary);
  }
  (void)printf("\n`evenstep bench COMMAND --help` tells more of each.\n");
  return 0;
}

int even_cli_bench(int argc, char **argv) {
  const char *names[BENCHES];
  const char *word = argc < 1 ? "" : argv[0];
  if (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0) {
    return help();
  }
  for (size_t i = 0; i < BENCHES; i++) {
    names[i] = benches[i].name;
    if (strcmp(word, benches[i].name) == 0) {
      return benches[i].run(argc - 1, argv + 1);
    }
  }
  if (word[0] == '\0' || word[0] == '-') {
    (void)even_fail(EVEN_ERR_USAGE, "bench: of what?");
    (void)even_error_fix("evenstep bench comm [options], or evenstep bench balance [options]");
    return even_cli_fail();
  }
  const char *nearest = even_nearest(word, names, BENCHES);
  (void)even_fail(EVEN_ERR_USAGE, "bench: there is no bench %s", word);
  (void)even_error_fix("did you mean `evenstep bench %s`? `evenstep bench --help` lists them",
                       nearest == NULL ? "comm" : nearest);
  return even_cli_fail();
}
