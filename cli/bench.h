/* What `evenstep bench` measures: one file cli/bench_NAME.c and one line in bench.c each. */
#ifndef EVEN_CLI_BENCH_H
#define EVEN_CLI_BENCH_H

/* As commands: the words after their name; the exit code. */
int even_bench_comm(int argc, char **argv);
int even_bench_balance(int argc, char **argv);

#endif
