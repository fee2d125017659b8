"""`python -m crossover` is the console command."""

from crossover import main

if __name__ == "__main__":
    main()
